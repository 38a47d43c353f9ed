"""The mathematics of nested rounds: how many tokens a level delivers per call, and at what cost.

Letters: a *production* of a level is what one call delivers; p(k) is the probability that the lower level's
production has k tokens (k ≥ 1), μ its mean; w the window of the level above; a its acceptance of the lower level's
tokens, independent from position to position. The level above collects productions until it holds L ≥ w tokens.
Afterwards all lower levels start afresh, so collecting is a renewal process, and with u(s) = Σ p(k) u(s − k), u(0) =
1 (the chance that the sum ever is s) everything follows without simulation:

    calls      C(w) = Σ_{s<w} u(s)                         tokens held    E[L] = μ C(w)  (Wald)
    all equal  A(w) = E[a^L] = Σ p(k) a^k A(w − k), A(≤ 0) = 1
    delivered  E = Σ_{j=0}^{L} a^j = (1 − a A(w)) / (1 − a)
    exactly    P(delivered > j) = a^j P(L ≥ j),  P(L ≥ j) = Σ_{s<w} u(s) P(k ≥ j − s) for j ≥ w
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

NEGLIGIBLE = 1e-6
"""Productions are cut where a longer one is this unlikely."""


@dataclass(frozen=True, slots=True)
class Production:
    """What one call delivers: `survival[j]` = P(more than j tokens), `time_ms` with everything below it."""

    survival: tuple[float, ...]
    time_ms: float

    @property
    def mean_tokens(self) -> float:
        return sum(self.survival)


@dataclass(frozen=True, slots=True)
class Sweep:
    """The means for every window 1 … W over one lower production; entry i belongs to window i + 1."""

    calls: tuple[float, ...]
    held_tokens: tuple[float, ...]
    all_equal: tuple[float, ...]


def sweep(lower: Production, acceptance: float, max_window: int) -> Sweep:
    """C(w), E[L] and A(w) for w = 1 … `max_window`, in O(max_window²)."""
    tail = lower.survival
    pmf = masses(tail)[:max_window]
    scaled = [mass * acceptance ** (k + 1) for k, mass in enumerate(pmf)]
    beyond = _all_scaled(tail, acceptance)
    calls: list[float] = []
    equal: list[float] = []
    for w in range(1, max_window + 1):
        reversed_calls, reversed_equal = calls[::-1], equal[::-1]
        calls.append(1.0 + sum(map(mul, pmf, reversed_calls)))
        beyond -= scaled[w - 2] if 2 <= w <= len(scaled) + 1 else 0.0
        equal.append(max(0.0, beyond) + sum(map(mul, scaled, reversed_equal)))
    mean = lower.mean_tokens
    return Sweep(tuple(calls), tuple(mean * c for c in calls), tuple(equal))


def delivered(acceptance: float, all_equal: float, held_tokens: float) -> float:
    """Mean tokens that a check delivers, its own token included."""
    if acceptance > 1.0 - 1e-9:
        return held_tokens + 1.0
    return (1.0 - acceptance * all_equal) / (1.0 - acceptance)


def checked_survival(lower: Production, acceptance: float, window: int) -> tuple[float, ...]:
    """P(a check of everything held delivers more than j tokens), for j = 0, 1, …"""
    tail = lower.survival
    reach = _reach(masses(tail), window)
    survival = [acceptance**j for j in range(window + 1)]
    longest = window - 1 + len(tail)
    for j in range(window + 1, longest + 1):
        held = sum(reach[s] * tail[j - s - 1] for s in range(max(0, j - len(tail)), window))
        probability = acceptance**j * held
        if probability < NEGLIGIBLE:
            break
        survival.append(probability)
    return tuple(survival)


def masses(survival: Sequence[float]) -> list[float]:
    """p(1), p(2), … from P(k > 0), P(k > 1), …"""
    return [survival[j] - (survival[j + 1] if j + 1 < len(survival) else 0.0) for j in range(len(survival))]


def _reach(pmf: Sequence[float], window: int) -> list[float]:
    """u(0) … u(window − 1)."""
    reach = [1.0]
    for _ in range(1, window):
        reach.append(sum(map(mul, pmf, reversed(reach))))
    return reach


def _all_scaled(survival: Sequence[float], acceptance: float) -> float:
    return sum(mass * acceptance ** (k + 1) for k, mass in enumerate(masses(survival)))
