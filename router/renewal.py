"""The mathematics of nested rounds: how many tokens a level delivers per call, and at what cost.

A *production* of a level is what one call delivers: tokens of the level below that it kept, and one of its own, which
replaces the first that it rejected (`corrected`) or follows when it kept them all (`extended`). The level above
collects productions until it holds L ≥ w tokens, w being its window, and checks them. It keeps tokens of the three
kinds with unlike probabilities (`Rates`), independent from position to position. Afterwards all lower levels start
afresh, so collecting is a renewal process and everything follows without simulation. With p(k) the probability of a
production of k tokens, μ their mean, G(k) the probability that it has k and all are kept, H(j) that its first j are:

    u(s) = Σ p(k) u(s − k), u(0) = 1      P(the sum of productions ever is s)
    v(s) = Σ G(k) v(s − k), v(0) = 1      the same, and all of them are kept
    calls      C(w) = Σ_{s<w} u(s)                     tokens held   E[L] = μ C(w)  (Wald)
    delivered  E = 1 + (Σ_j H(j)) Σ_{s<w} v(s)         all kept      Σ_{s<w} v(s) Σ_{k ≥ w−s} G(k)
    exactly    P(delivered > j) = Σ_{s<w} v(s) H(j − s),  P(all L kept) = Σ_{s<w} v(s) G(L − s)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from router.checks import Kind

NEGLIGIBLE = 1e-6
"""Productions are cut where a longer one is this unlikely."""


@dataclass(frozen=True, slots=True)
class Production:
    """`corrected[k]`, `extended[k]`: the probability of k kept tokens and an own one of that kind; `time_ms` of a call
    with everything below it.
    """

    corrected: tuple[float, ...]
    extended: tuple[float, ...]
    time_ms: float

    @property
    def masses(self) -> list[float]:
        """p(1), p(2), …"""
        return [a + b for a, b in zip(self.corrected, self.extended, strict=True)]

    @property
    def mean_tokens(self) -> float:
        return sum((k + 1) * mass for k, mass in enumerate(self.masses))


@dataclass(frozen=True, slots=True)
class Rates:
    """With which probability the level above keeps a token of each kind.

    `tail`: where the level below drafts only `head` tokens of a production, the same for those that a tail drafted.
    """

    kept: float
    corrected: float
    extended: float
    head: int = 0
    tail: "Rates | None" = None

    def at(self, index: int) -> "Rates":
        """Of the token at an index of a production."""
        return self if self.tail is None or index < self.head else self.tail

    def kept_powers(self, count: int) -> list[float]:
        """The probability that the first 0, 1, … `count` − 1 tokens of a production are kept, all of them of that
        kind.
        """
        if self.tail is None:
            return [self.kept**k for k in range(count)]
        after_head = self.kept**self.head
        return [
            self.kept**k if k <= self.head else after_head * self.tail.kept ** (k - self.head) for k in range(count)
        ]

    def of(self, kind: Kind) -> float:
        """Of one token."""
        if kind is Kind.KEPT:
            return self.kept
        return self.corrected if kind is Kind.CORRECTED else self.extended


@dataclass(frozen=True, slots=True)
class Sweep:
    """The means for every window 1 … W over one lower production; entry i belongs to window i + 1."""

    calls: tuple[float, ...]
    held_tokens: tuple[float, ...]
    delivered: tuple[float, ...]
    all_kept: tuple[float, ...]


def sweep(lower: Production, rates: Rates, max_window: int) -> Sweep:
    """In O(`max_window`²)."""
    masses = lower.masses
    all_kept = _all_kept(lower, rates)
    calls = tuple(accumulate(_renewals(masses, max_window)))
    kept_sums = _renewals(all_kept, max_window)
    most_kept = sum(_first_kept(masses, all_kept, rates))
    beyond = _tails(all_kept, max_window)
    mean = lower.mean_tokens
    return Sweep(
        calls,
        tuple(mean * c for c in calls),
        tuple(1.0 + most_kept * reached for reached in accumulate(kept_sums)),
        tuple(sum(map(mul, kept_sums, beyond[w::-1])) for w in range(max_window)),
    )


def checked(lower: Production, rates: Rates, window: int, time_ms: float) -> Production:
    """What a check of everything held delivers."""
    masses = lower.masses
    all_kept = _all_kept(lower, rates)
    kept_sums = _renewals(all_kept, window)
    first_kept = _first_kept(masses, all_kept, rates)
    more, corrected, extended = 1.0, [], []
    for held in range(window + len(masses)):
        ends = range(max(0, held - len(masses)), min(held, window))  # of the productions before the last
        all_of = sum(kept_sums[s] * all_kept[held - s - 1] for s in ends) if held >= window else 0.0
        ends = range(max(0, held + 1 - len(masses)), min(held + 1, window))
        longer = sum(kept_sums[s] * first_kept[held - s] for s in ends)
        corrected.append(max(0.0, more - longer - all_of))
        extended.append(all_of)
        more = longer
        if more < NEGLIGIBLE:
            break
    return Production(tuple(corrected), tuple(extended), time_ms)


def _all_kept(lower: Production, rates: Rates) -> list[float]:
    """G(1), G(2), …"""
    kinds = zip(rates.kept_powers(len(lower.corrected)), lower.corrected, lower.extended, strict=True)
    return [
        power * (rates.at(k).corrected * corrected + rates.extended * extended)
        for k, (power, corrected, extended) in enumerate(kinds)
    ]


def _first_kept(masses: Sequence[float], all_kept: Sequence[float], rates: Rates) -> list[float]:
    """H(1), H(2), …"""
    longer = _tails(masses, len(masses) + 1)[1:]
    powers = rates.kept_powers(len(masses) + 1)[1:]
    return [power * more + whole for power, more, whole in zip(powers, longer, all_kept, strict=True)]


def _tails(masses: Sequence[float], count: int) -> list[float]:
    """Sums of the masses from the first, second, … on."""
    tails = [*accumulate(reversed(masses))][::-1]
    return [*tails[:count], *[0.0] * (count - len(tails))]


def _renewals(masses: Sequence[float], count: int) -> list[float]:
    """The probability that a sum of draws from `masses` ever is 0, 1, … `count` − 1."""
    reached = [1.0]
    for _ in range(1, count):
        reached.append(sum(map(mul, masses, reversed(reached))))
    return reached
