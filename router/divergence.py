"""How far apart two models' distributions are, from the likeliest tokens that each states. Pure.

p and q stand for the distributions at one position (`kvstate.protocol.Top`). Of tokens that a list leaves out, only two
things are known: their whole mass, and that each is at most as likely as the last one listed. So what follows from p
and q is known within bounds, which meet where both lists leave nothing out. Point masses list one token.

    divergence            total variation, 1 − Σ_v min(p_v, q_v)
    predicted acceptance  of two models that sample with the same noise: Σ_v 1 / Σ_w max(p_w/p_v, q_w/q_v)
                          (arXiv 2408.07978), between (1 − divergence) / (1 + divergence) and 1 − divergence

Both sums rest on one quantity, the overlap of measures scaled by a and b: Σ_w min(a p_w, b q_w). The sum in the
acceptance is 1/p_v + 1/q_v less the overlap for a = 1/p_v, b = 1/q_v.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from kvstate.protocol import Top

HALF_LIFE_POSITIONS = 1000.0
LEAST_LISTED = 1e-12
"""Less likely tokens count as left out: they change nothing, and their inverse could not be computed with."""


class Interval(NamedTuple):
    """`least` ≤ the exact value ≤ `most`, to rounding."""

    least: float
    most: float

    @property
    def middle(self) -> float:
        return (self.least + self.most) / 2.0


class Bounds(NamedTuple):
    """At one position, or the means over many."""

    divergence: Interval
    acceptance: Interval


def bounds(p: Top, q: Top) -> Bounds:
    """Of two lists, neither of them empty."""
    overlap = _Overlap.of(p, q)
    shared = overlap.listed.sum(1.0, 1.0)
    most_shared = overlap.most(1.0, 1.0)
    least_acceptance, most_acceptance = 0.0, most_shared - shared  # a token in one list: at most min(p_v, q_v)
    for p_v, q_v in overlap.listed.pairs:
        a, b = 1.0 / p_v, 1.0 / q_v
        least_acceptance += 1.0 / (a + b - overlap.listed.sum(a, b))
        most_acceptance += 1.0 / (a + b - overlap.most(a, b))
    most_acceptance = min(most_acceptance, most_shared)
    return Bounds(_interval(1.0 - most_shared, 1.0 - shared), _interval(least_acceptance, most_acceptance))


@dataclass(slots=True)
class DivergenceEstimate:
    """Means over positions, the newest counting most; `samples` counts all that were ever observed.

    `has_spread`: not all of them were point masses, of which equality tells all.
    """

    samples: int = 0
    has_spread: bool = False
    _weight: float = 0.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 4)

    def observe(self, lower: Sequence[Top], upper: Sequence[Top]) -> None:
        """What two models state of the same positions; positions that one of them leaves empty tell nothing."""
        fade = 0.5 ** (1.0 / HALF_LIFE_POSITIONS)
        for p, q in zip(lower, upper, strict=True):
            if p and q:
                found = bounds(p, q)
                self.samples += 1
                self.has_spread |= len(p) > 1 or len(q) > 1
                self._weight = self._weight * fade + 1.0
                new = (*found.divergence, *found.acceptance)
                self._sums = [total * fade + value for total, value in zip(self._sums, new, strict=True)]

    @property
    def bounds(self) -> Bounds | None:
        """None before the first observation."""
        if not self.samples:
            return None
        means = [total / self._weight for total in self._sums]
        return Bounds(Interval(*means[:2]), Interval(*means[2:]))

    @property
    def divergence(self) -> Interval | None:
        return None if self.bounds is None else self.bounds.divergence

    @property
    def acceptance(self) -> Interval | None:
        """Predicted, where both sample at a temperature; says nothing of greedy sampling."""
        return None if self.bounds is None else self.bounds.acceptance


class _MinSum:
    """Σ min(a x, b y) over pairs (x, y) above 0, for any a and b, in O(log n): a x is the smaller where x/y ≤ b/a."""

    def __init__(self, pairs: Iterable[tuple[float, float]]) -> None:
        self.pairs = sorted(pairs, key=lambda pair: pair[0] / pair[1])
        self._ratios = [x / y for x, y in self.pairs]
        self._x = [0.0, *accumulate(x for x, _ in self.pairs)]
        self._y = [*reversed([*accumulate((y for _, y in reversed(self.pairs)), initial=0.0)])]

    def sum(self, a: float, b: float) -> float:
        place = bisect_right(self._ratios, b / a)
        return a * self._x[place] + b * self._y[place]


@dataclass(frozen=True, slots=True)
class _Overlap:
    """Parts of Σ_w min(a p_w, b q_w): tokens in both lists, and the most that tokens in one of them can give.

    `rest_p` is the mass that p's list leaves out.
    """

    listed: _MinSum
    in_p: _MinSum
    in_q: _MinSum
    rest_p: float
    rest_q: float

    @classmethod
    def of(cls, p_top: Top, q_top: Top) -> "_Overlap":
        p, q = ({token: value for token, value in top if value >= LEAST_LISTED} for top in (p_top, q_top))
        rest_p, rest_q = (max(0.0, 1.0 - sum(listed.values())) for listed in (p, q))
        cap_p, cap_q = min(rest_p, *p.values()), min(rest_q, *q.values())
        in_p = [(x, cap_q) for token, x in p.items() if token not in q and cap_q > 0.0]
        in_q = [(cap_p, y) for token, y in q.items() if token not in p and cap_p > 0.0]
        listed = _MinSum((x, q[token]) for token, x in p.items() if token in q)
        return cls(listed, _MinSum(in_p), _MinSum(in_q), rest_p, rest_q)

    def most(self, a: float, b: float) -> float:
        """What q leaves out lies on tokens in p's list or in none; what p leaves out likewise."""
        rest_p, rest_q = a * self.rest_p, b * self.rest_q
        of_q = min(rest_q, self.in_p.sum(a, b))
        of_p = min(rest_p, self.in_q.sum(a, b))
        return self.listed.sum(a, b) + of_p + of_q + min(rest_p - of_p, rest_q - of_q)


def _interval(least: float, most: float) -> Interval:
    """Within 0 … 1, and in order where rounding put two equal values out of it."""
    least = min(1.0, max(0.0, least))
    return Interval(least, min(1.0, max(least, most)))
