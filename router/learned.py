"""What the router has learned of agreement, in a form that outlives the process. Pure.

Times are not kept: a replica measures its own when it loads. What is restored counts as at most `MOST_RESTORED`
positions, so that it is a start and no anchor.
"""

import msgspec

from router.keys import Context, Pair, Triple

VERSION = 1
MOST_RESTORED = 150.0

Counts = tuple[float, float]
"""Successes and trials."""


class PairLearned(msgspec.Struct, frozen=True, array_like=True):
    """`drafts[j]`: of drafts with j accepted tokens, how many went on; `dispersion`: ratio, positions, requests."""

    acceptance: Counts
    probed: Counts
    drafts: list[Counts]
    dispersion: tuple[float, float, int]


class SubjectsLearned(msgspec.Struct, frozen=True, array_like=True):
    """Of one level's drafters (router/subjects.py). By subject: its `requests`; of each drafter positions `tried` and
    those at which it was `right`; `words`: how many of the requests had each, those of none left out.
    """

    drafters: list[str]
    requests: list[float]
    tried: list[list[float]]
    right: list[list[float]]
    words: list[dict[int, float]]

    def __post_init__(self) -> None:
        if not len(self.requests) == len(self.tried) == len(self.right) == len(self.words):
            raise ValueError("not one entry per subject")
        if any(len(row) != len(self.drafters) for row in (*self.tried, *self.right)):
            raise ValueError("not one entry per drafter")


class Learned(msgspec.Struct, frozen=True):
    """`drafts`: per model, of drafts with j tokens, how many went on. `triples`: positions of both, first, second.
    `subjects`: by level.
    """

    drafts: dict[str, list[Counts]]
    pairs: list[tuple[Context, Pair, PairLearned]]
    triples: list[tuple[Triple, tuple[Counts, Counts, Counts]]]
    subjects: dict[int, SubjectsLearned] = {}
    version: int = VERSION


NOTHING = Learned({}, [], [])


class UnreadableError(ValueError):
    """These bytes were not written by this version."""


def encode(learned: Learned) -> bytes:
    return msgspec.json.encode(learned)


def decode(data: bytes) -> Learned:
    """Raises UnreadableError."""
    try:
        learned = msgspec.json.decode(data, type=Learned)
    except msgspec.MsgspecError as error:
        raise UnreadableError(str(error)) from error
    if learned.version != VERSION:
        raise UnreadableError(f"version {learned.version}, not {VERSION}")
    return learned


def faded(counts: Counts) -> Counts:
    """As it is restored."""
    successes, trials = counts
    trials = max(0.0, trials)
    share = min(1.0, MOST_RESTORED / trials) if trials else 0.0
    return share * min(max(0.0, successes), trials), share * trials
