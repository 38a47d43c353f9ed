"""To which context a request belongs: its class, from what is cheap to see of its text, and its sampling regime. Pure.

Drafters are right unlike often on code, on arithmetic, on languages they saw little of, and on prompts whose words come
back in the answer; and the more random the sampling, the less often two models agree. Estimates are kept per context
(router/table.py), so there are few: five kinds of text, short or long, times three regimes.
"""

import re
import zlib

from kvstate.protocol import Sampling
from router.keys import EVERY, Context

MOST_CHARACTERS = 4096
"""The end of the text is looked at, and no more."""

LONG_CHARACTERS = 1500
REPETITIVE_RATIO = 0.3
_REPETITIVE_CHARACTERS = 400
_CODE_MARKS = frozenset("{}[]();<>_#`\\|&")
_CODE_SHARE, _DIGITS_SHARE, _FOREIGN_SHARE = 0.05, 0.015, 0.2
_CODE_WORDS = re.compile(
    r"\b(python|java|javascript|typescript|c\+\+|rust|golang|sql|html|css|bash|json|regex|algorithm|code|program"
    r"|function|class|compile|script)\b",
    re.IGNORECASE,
)
_WORDS = re.compile(r"[^\W\d_]+")
_ENGLISH = frozenset(
    """the of and to a in is that it for on with as are this be by from or have an at not you which can your what how
    was were has their there if will do does i my we he she they his her its would write give""".split()  # noqa: SIM905
)
_ENGLISH_SHARE = 0.15
_FEWEST_WORDS = 8

KINDS = ("code", "foreign", "digits", "repetitive", "prose")
CLASSES = frozenset(f"{length} {kind}" for length in ("short", "long") for kind in KINDS)


def classify(text: str) -> str:
    """The class of a prompt, one of `CLASSES`."""
    return f"{'long' if len(text) >= LONG_CHARACTERS else 'short'} {_kind(text[-MOST_CHARACTERS:])}"


def context_of(request_class: str, sampling: Sampling) -> Context:
    """A class that is not known is a request like all."""
    return (request_class if request_class in CLASSES else EVERY[0], _regime(sampling.temperature))


def _kind(text: str) -> str:
    if not text:
        return "prose"
    if sum(map(_CODE_MARKS.__contains__, text)) >= _CODE_SHARE * len(text) or (
        len(text) < LONG_CHARACTERS and _CODE_WORDS.search(text)
    ):
        return "code"
    if _is_foreign(text):
        return "foreign"
    if sum(map(str.isdigit, text)) >= _DIGITS_SHARE * len(text):
        return "digits"
    return "repetitive" if _is_repetitive(text) else "prose"


def _is_foreign(text: str) -> bool:
    """Not English: other letters, or hardly any of English's commonest words."""
    if sum(letter.isalpha() and not letter.isascii() for letter in text) >= _FOREIGN_SHARE * len(text):
        return True
    words = _WORDS.findall(text.lower())
    return len(words) >= _FEWEST_WORDS and sum(map(_ENGLISH.__contains__, words)) < _ENGLISH_SHARE * len(words)


def _is_repetitive(text: str) -> bool:
    data = text.encode()
    return len(data) >= _REPETITIVE_CHARACTERS and len(zlib.compress(data, 1)) <= REPETITIVE_RATIO * len(data)


def _regime(temperature: float) -> str:
    if temperature < 1e-5:
        return "greedy"
    return "cool" if temperature <= 0.5 else "warm"
