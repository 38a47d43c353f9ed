"""How a request's own text differs from what the table says of all: some are drafted easily, some not at all. Pure.

Per pair of levels, the acceptances that this request saw are held against those that the table expected of the same
positions. The difference, in log-odds, shifts the table's rates for this request's plans. It fades with a half-life of
34 rounds, seen or unseen, so that a chain given up is tried again; and it is rounded, so that requests share plans.
"""

import math
from dataclasses import dataclass, field, replace

from router.table import TableSnapshot

Pair = tuple[str, str]
Shifts = tuple[tuple[Pair, float], ...]
"""In log-odds, by pair, sorted; pairs that are as the table says are not named."""

FADE = 0.98
PRIOR_POSITIONS = 6.0
STEP = 0.75
MOST_SHIFT = 2.25
_LEAST_RATE = 0.02


@dataclass(slots=True)
class _Seen:
    """Positions examined, those accepted, and how many of them the table expected to be."""

    positions: float = 0.0
    accepted: float = 0.0
    expected: float = 0.0

    def shift(self) -> float:
        """Log-odds of the own rate over the expected one; the expected one counts as PRIOR_POSITIONS of one's own."""
        if not self.positions:
            return 0.0
        expected = self.expected / self.positions
        own = (self.accepted + expected * PRIOR_POSITIONS) / (self.positions + PRIOR_POSITIONS)
        return _log_odds(own) - _log_odds(expected)


@dataclass(slots=True)
class OwnRates:
    """Of one request; `shifts` are those of the present round."""

    shifts: Shifts = ()
    _seen: dict[Pair, _Seen] = field(default_factory=dict)

    def observe(self, pair: Pair, num_accepted: int, expected: list[float]) -> None:
        """`expected[j]`: the table's rate at position j, for all that were checked (or asked for, of one draft)."""
        examined = expected[: num_accepted + 1]
        seen = self._seen.setdefault(pair, _Seen())
        seen.positions += len(examined)
        seen.accepted += num_accepted
        seen.expected += sum(examined)

    def end_round(self) -> None:
        for seen in self._seen.values():
            seen.positions, seen.accepted, seen.expected = (
                FADE * value for value in (seen.positions, seen.accepted, seen.expected)
            )
        rounded = ((pair, STEP * round(seen.shift() / STEP)) for pair, seen in sorted(self._seen.items()))
        self.shifts = tuple((pair, max(-MOST_SHIFT, min(MOST_SHIFT, shift))) for pair, shift in rounded if shift)


def shifted(snapshot: TableSnapshot, shifts: Shifts) -> TableSnapshot:
    """The table as it is for a request that differs from the others by `shifts`."""
    pairs = dict(snapshot.pairs)
    for pair, shift in shifts:
        estimate = pairs[pair]
        goes_on = tuple(_shift(rate, shift) for rate in estimate.goes_on)
        pairs[pair] = replace(estimate, acceptance=_shift(estimate.acceptance, shift), goes_on=goes_on)
    return replace(snapshot, pairs=pairs)


def _shift(rate: float, log_odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-_log_odds(rate) - log_odds))


def _log_odds(rate: float) -> float:
    bounded = max(_LEAST_RATE, min(1.0 - _LEAST_RATE, rate))
    return math.log(bounded / (1.0 - bounded))
