"""Several drafters make one draft: at each position they propose tokens, one is fused from them and goes to all. Pure.

The fused token is the one with the largest summed confidence over its proposers (CoSine, arXiv 2503.10325), a
confidence being the calibrated probability that a drafter's own sample is the checker's (router/calibration.py). How
probable it and every other stated token are is another question, which ends drafts and grows trees: by Bayes, drafters
taken to err independently. What that overstates where they err alike is learned (`FusionGain`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from kvstate.protocol import Guesses
from router.acceptance import HALF_LIFE_POSITIONS

Trust = Callable[[str, float], float]
"""Drafter and the probability it states for its sample → what to believe of it."""

MOST_ENUMERATED = 6
MOST_GAIN = 1.5
PRIOR_GAIN, PRIOR_TOKENS = 0.7, 4.0
"""What is expected of fusion until it was tried, and how many tokens that it could have gained this guess is worth."""


@dataclass(frozen=True, slots=True)
class Fused:
    """One position: `stated` by drafter; `likely`: all tokens stated, each with the probability that it is the
    checker's, the fused token first, then falling.
    """

    stated: Mapping[str, Guesses]
    likely: Guesses

    @property
    def token(self) -> int:
        return self.likely[0][0]

    @property
    def probability(self) -> float:
        return self.likely[0][1]


def fuse(stated: Mapping[str, Guesses], trust: Trust) -> Fused:
    """Of what each drafter states at one position, its sample first; one drafter at least, each with one token.

    Of equal sums the lowest token id, so that the draft does not depend on who answered first.
    """
    trusted = {drafter: _trusted(guesses, trust(drafter, guesses[0][1])) for drafter, guesses in stated.items()}
    sums: dict[int, float] = {}
    for guesses in trusted.values():
        sums[guesses[0][0]] = sums.get(guesses[0][0], 0.0) + guesses[0][1]
    token = min(sums, key=lambda t: (-sums[t], t))
    probability = _posterior(list(trusted.values()))
    likely = sorted(probability.items(), key=lambda pair: (pair[0] != token, -pair[1], pair[0]))
    return Fused(stated, tuple(likely))


def _trusted(guesses: Guesses, confidence: float) -> Guesses:
    """The stated tokens, the first with `confidence`; the others share what it leaves as they did before."""
    token, stated = guesses[0]
    scale = (1.0 - confidence) / max(1e-6, 1.0 - stated)
    return (token, confidence), *((other, min(1.0, scale * p)) for other, p in guesses[1:])


def _posterior(all_guesses: Sequence[Guesses]) -> dict[int, float]:
    """Of each stated token, that none of them is right being possible."""
    tokens = dict.fromkeys(token for guesses in all_guesses for token, _ in guesses)
    rest = [max(1e-6, 1.0 - sum(p for _, p in guesses)) for guesses in all_guesses]
    known = [dict(guesses) for guesses in all_guesses]
    weights = {t: prod(k.get(t, r) for k, r in zip(known, rest, strict=True)) for t in tokens}
    total = sum(weights.values()) + prod(rest)
    return {token: weight / total for token, weight in weights.items()}


@lru_cache(maxsize=4096)
def independent(rates: tuple[float, ...]) -> float:
    """How often the fused token is right where drafters are right with these `rates`, independently of one another, and
    wrong tokens differ: the right ones outweigh the strongest wrong one. Ties count half. Of many drafters, two that
    are right are taken to outweigh any that is wrong.
    """
    if len(rates) > MOST_ENUMERATED:
        return _two_or_the_strongest(rates)
    right = 0.0
    for outcome in product((True, False), repeat=len(rates)):
        probability = prod(r if is_right else 1.0 - r for r, is_right in zip(rates, outcome, strict=True))
        for_it = sum(r for r, is_right in zip(rates, outcome, strict=True) if is_right)
        against = max((r for r, is_right in zip(rates, outcome, strict=True) if not is_right), default=0.0)
        if for_it > 0.0:
            right += probability * (1.0 if for_it > against + 1e-9 else 0.5 if for_it > against - 1e-9 else 0.0)
    return right


def _two_or_the_strongest(rates: Sequence[float]) -> float:
    """Two drafters or more are right, or one is that has the largest rate."""
    none = prod(1.0 - rate for rate in rates)
    alone = [none * rate / max(1e-9, 1.0 - rate) for rate in rates]
    strongest = max(rates)
    wins = [one for one, rate in zip(alone, rates, strict=True) if rate > strongest - 1e-9]
    return 1.0 - none - sum(alone) + sum(wins) * (1.0 if len(wins) == 1 else 0.5)


@dataclass(slots=True)
class FusionGain:
    """How much of what fusion would gain with independent errors it gains: 0 where drafters err alike.

    Of positions at which a fused token was compared with the checker's.
    """

    _gained: float = 0.0
    _possible: float = 0.0

    def observe(self, rates: Sequence[float], num_right: int, num_positions: int) -> None:
        """`rates` of the drafters that took part."""
        coarse, fade = _coarse(rates), 0.5 ** (num_positions / HALF_LIFE_POSITIONS)
        best = max(coarse)
        self._gained = self._gained * fade + num_right - best * num_positions
        self._possible = self._possible * fade + (independent(coarse) - best) * num_positions

    @property
    def share(self) -> float:
        gained = (self._gained + PRIOR_GAIN * PRIOR_TOKENS) / (self._possible + PRIOR_TOKENS)
        return max(0.0, min(MOST_GAIN, gained))

    def acceptance(self, rates: Sequence[float]) -> float:
        """Of the fused tokens of drafters with these rates."""
        coarse = _coarse(rates)
        return min(0.99, max(rates) + self.share * (independent(coarse) - max(coarse)))


def _coarse(rates: Sequence[float]) -> tuple[float, ...]:
    """So that what is computed of them once serves again."""
    return tuple(sorted(round(rate, 2) for rate in rates))
