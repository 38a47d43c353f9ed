"""What to believe of the confidence that drafters state. Pure.

Per drafter, over all requests: how often its sample was the checker's where it stated about as much. Per request: how
much more or less often it was than that, in log-odds, which fades as `OwnRates` does. Units: positions.
"""

from dataclasses import dataclass, field

from router.acceptance import FadingCount, log_odds, shift_rate
from router.own_rates import Seen

NUM_BINS = 12
_STATED_POSITIONS = 24.0
"""How many positions what a drafter states is worth in each bin."""

_AS_OTHERS_POSITIONS = 12.0
"""How many positions of a request it is worth that drafters are right there as often as elsewhere."""

_FADE = 0.99


def _bin(stated: float) -> int:
    """Of equal width in log-odds, from −4.5 to 4.5."""
    return max(0, min(NUM_BINS - 1, int((log_odds(stated) + 4.5) / 9.0 * NUM_BINS)))


@dataclass(slots=True)
class Calibration:
    """Of one drafter."""

    _bins: list[FadingCount] = field(default_factory=lambda: [FadingCount() for _ in range(NUM_BINS)])

    def observe(self, stated: float, is_right: bool) -> None:
        self._bins[_bin(stated)].add(is_right, 1)

    def of(self, stated: float) -> float:
        return self._bins[_bin(stated)].rate_from(stated, _STATED_POSITIONS)


@dataclass(slots=True)
class Trusting:
    """Of one request; `calibrations` of all drafters, by name, are shared by all requests."""

    calibrations: dict[str, Calibration]
    _seen: dict[str, Seen] = field(default_factory=dict)

    def trust(self, drafter: str, stated: float) -> float:
        """The probability that the drafter's sample is the checker's."""
        calibration, seen = self.calibrations.get(drafter), self._seen.get(drafter)
        believed = stated if calibration is None else calibration.of(stated)
        return believed if seen is None else shift_rate(believed, seen.shift())

    def observe(self, drafter: str, stated: float, is_right: bool) -> None:
        calibration = self.calibrations.setdefault(drafter, Calibration())
        seen = self._seen.setdefault(drafter, Seen(_AS_OTHERS_POSITIONS))
        seen.fade(_FADE)
        seen.add(1.0, is_right, calibration.of(stated))
        calibration.observe(stated, is_right)
