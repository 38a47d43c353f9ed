"""How often an upper level accepts a lower level's token, followed while it drifts.

Units: positions. A check of n tokens that accepted k examined k + 1 of them (the mismatch is the last it looked at),
or n when all were accepted. Each examined position is one trial; trials fade with a half-life of 2,000 positions, so
at constant acceptance a the estimate's error is about sqrt(a (1 - a) / 5800).

A change is noticed by comparison: the last 320 trials are kept in blocks of eight, and when some most recent part of
them is too unlike all that came before (likelihood ratio of two rates against one), what came before is dropped. Where
requests differ, unlike parts are no change: `Dispersion` measures by how much, and smaller changes than that are not
noticed.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from router.learned import Counts, faded

PRIOR_ACCEPTANCE = 0.5
PRIOR_POSITIONS = 2.0
HALF_LIFE_POSITIONS = 2000.0
_RECENT_TRIALS = 320
_BLOCK_TRIALS = _TEST_EVERY_TRIALS = 8
_POSITION_WEIGHT = 8.0
_LEAST_RATE = 0.02
_ASSOCIATION_POSITIONS = 32.0
_LEAST_POSITIONS, _MOST_POSITIONS = 8, 60
_MOST_DISPERSION = 20.0
_LEAST_PRIOR_POSITIONS, MOST_PRIOR_POSITIONS = 4.0, 200.0
_SURELY_ALIKE = 0.4
"""Of the least log ratio: below it the rough one need not be computed exactly."""

_LEAST_LOG_RATIO = 7.5
"""A lower one raises false alarms, which cost accuracy until as much is learned again."""


@dataclass(slots=True)
class FadingCount:
    """Trials and successes with exponential fading."""

    successes: float = 0.0
    trials: float = 0.0

    def add(self, successes: int, trials: int) -> None:
        fade = 0.5 ** (trials / HALF_LIFE_POSITIONS)
        self.successes = self.successes * fade + successes
        self.trials = self.trials * fade + trials

    @property
    def counts(self) -> Counts:
        return self.successes, self.trials

    def rate_from(self, prior: float, weight: float) -> float:
        """The share of successes, the prior counting as much as `weight` trials."""
        return (self.successes + prior * weight) / (self.trials + weight)


@dataclass(slots=True)
class Acceptance:
    """One ordered pair. `samples` counts positions examined, those before a change left out; `dispersion` as in
    `Dispersion`.
    """

    samples: int = 0
    dispersion: float = 1.0
    num_changes: int = 0
    _all: FadingCount = field(default_factory=FadingCount)
    _recent: deque[tuple[int, int]] = field(default_factory=deque)
    _recent_trials: int = 0
    _untested_trials: int = 0

    @property
    def rate(self) -> float:
        return self._all.rate_from(PRIOR_ACCEPTANCE, PRIOR_POSITIONS)

    def rate_from(self, prior: float, weight: float) -> float:
        return self._all.rate_from(prior, weight)

    @property
    def counts(self) -> Counts:
        return self._all.counts

    @classmethod
    def restored(cls, counts: Counts) -> "Acceptance":
        successes, trials = faded(counts)
        return cls(int(trials), _all=FadingCount(successes, trials))

    def observe_check(self, num_checked: int, num_accepted: int) -> None:
        """`num_accepted` of `num_checked` tokens equalled the upper level's samples, up to the first mismatch."""
        assert 0 <= num_accepted <= num_checked, "a check accepts at most what it checked"
        self.observe(num_accepted, min(num_checked, num_accepted + 1))

    def observe(self, successes: int, trials: int) -> None:
        if trials <= 0:
            return
        self.samples += trials
        self._all.add(successes, trials)
        if self._recent and self._recent[-1][1] < _BLOCK_TRIALS:
            before = self._recent.pop()
            self._recent.append((before[0] + successes, before[1] + trials))
        else:
            self._recent.append((successes, trials))
        self._recent_trials += trials
        while self._recent_trials > _RECENT_TRIALS and len(self._recent) > 1:
            self._recent_trials -= self._recent.popleft()[1]
        self._untested_trials += trials
        if self._untested_trials >= _TEST_EVERY_TRIALS:
            self._untested_trials = 0
            self._forget_before_change()

    def _forget_before_change(self) -> None:
        """Split memory where the two parts differ most; keep only the newer one if they differ enough."""
        newer_successes = newer_trials = num_newer = 0
        best_ratio, best_split, next_tested = _LEAST_LOG_RATIO * self.dispersion, (0, 0, 0), 8.0
        worth_computing = _SURELY_ALIKE * best_ratio
        for successes, trials in reversed(self._recent):
            newer_successes, newer_trials, num_newer = newer_successes + successes, newer_trials + trials, num_newer + 1
            if newer_trials < next_tested:
                continue
            next_tested = 1.5 * newer_trials
            if self._half_square(newer_successes, newer_trials) > worth_computing:
                ratio = self._log_ratio(newer_successes, newer_trials)
                if ratio > best_ratio:
                    best_ratio, best_split = ratio, (newer_successes, newer_trials, num_newer)
        if best_split[2]:
            self._keep_newest(*best_split)

    def _half_square(self, successes: int, trials: int) -> float:
        """Half the squared difference of the two rates in standard errors: the log ratio, roughly, for little."""
        total_successes, total_trials = self._all.successes, self._all.trials
        older_trials = total_trials - trials
        variance = total_successes * (total_trials - total_successes)  # of a rate, times the square of the trials
        if older_trials < 8.0 or variance <= 0.0:
            return 0.0
        apart = successes * total_trials - total_successes * trials
        return 0.5 * apart * apart * total_trials / (trials * older_trials * variance)

    def _log_ratio(self, successes: int, trials: int) -> float:
        """How much better two rates explain the memory than one, as the logarithm of the likelihood ratio."""
        older_trials = self._all.trials - trials
        if older_trials < 8.0:
            return 0.0
        older_successes = min(max(0.0, self._all.successes - successes), older_trials)
        total = _log_likelihood(successes + older_successes, trials + older_trials)
        return _log_likelihood(successes, trials) + _log_likelihood(older_successes, older_trials) - total

    def _keep_newest(self, successes: int, trials: int, num_newer: int) -> None:
        self._all.successes, self._all.trials = float(successes), float(trials)
        self.samples, self.num_changes = trials, self.num_changes + 1
        while len(self._recent) > num_newer:
            self._recent.popleft()
        self._recent_trials = trials


@dataclass(slots=True)
class Association:
    """Whether three levels' errors fall together, from positions at which it was seen if the second's token equals the
    first's and if the third's equals the second's.
    """

    _both: FadingCount = field(default_factory=FadingCount)
    _first: FadingCount = field(default_factory=FadingCount)
    _second: FadingCount = field(default_factory=FadingCount)

    def observe(self, first_equal: bool, second_equal: bool) -> None:
        self._both.add(first_equal and second_equal, 1)
        self._first.add(first_equal, 1)
        self._second.add(second_equal, 1)

    @property
    def counts(self) -> tuple[Counts, Counts, Counts]:
        return self._both.counts, self._first.counts, self._second.counts

    @classmethod
    def restored(cls, counts: tuple[Counts, Counts, Counts]) -> "Association":
        return cls(*(FadingCount(*faded(count)) for count in counts))

    @property
    def strength(self) -> float:
        """0: independent; 1: both are equal as often as the two shares allow; −1: as seldom as they allow."""
        first, second = (count.rate_from(0.0, 1e-9) for count in (self._first, self._second))
        joint = self._both.rate_from(first * second, _ASSOCIATION_POSITIONS)
        apart = joint - first * second
        bound = min(first, second) if apart > 0.0 else max(0.0, first + second - 1.0)
        widest = abs(bound - first * second)
        return max(-1.0, min(1.0, apart / widest)) if widest > 1e-9 else 0.0


@dataclass(slots=True)
class PositionRates:
    """How often one more token follows when `j` did, for each j: real drafts come in runs, all right or none.

    What few trials leave open is taken from the position before, at the first one from `base`.
    """

    _positions: list[Acceptance] = field(default_factory=list)

    def observe(self, num_tokens: int, most: int, dispersion: float = 1.0) -> None:
        """One run ended after `num_tokens` of the `most` that were asked for."""
        examined = min(most, num_tokens + 1)
        while len(self._positions) < examined:
            self._positions.append(Acceptance())
        for j in range(examined):
            self._positions[j].dispersion = dispersion
            self._positions[j].observe(int(j < num_tokens), 1)

    @property
    def counts(self) -> list[Counts]:
        return [position.counts for position in self._positions]

    @classmethod
    def restored(cls, counts: Sequence[Counts]) -> "PositionRates":
        return cls([Acceptance.restored(count) for count in counts])

    def rates_from(self, others: Sequence[float], weight: float) -> Iterator[float]:
        """Each position's from what others say of it, the last of them of all further on, counting `weight` trials."""
        for j in range(max(len(self._positions), len(others))):
            other = others[min(j, len(others) - 1)]
            yield self._positions[j].rate_from(other, weight) if j < len(self._positions) else other

    def rates(self, base: float) -> Iterator[float]:
        """Of as many positions as were examined."""
        for position in self._positions:
            base = position.rate_from(base, _POSITION_WEIGHT)
            yield base


@dataclass(slots=True)
class Dispersion:
    """How unlike one another requests are: the variance between their acceptances by what chance alone gives, ≥ 1.

    From each request and the one before it, so that a change counts once; the mean over requests, of which the newest
    counts a tenth or more, after a guess that counts as one.
    """

    _ratio: float = 3.0
    _positions: float = 40.0
    _requests: int = 1
    _before: tuple[float, float] | None = None

    def observe(self, num_positions: float, num_accepted: float) -> None:
        """One whole request: its positions that were examined, and those accepted."""
        if num_positions < _LEAST_POSITIONS:
            return
        counted = min(num_positions, _MOST_POSITIONS)
        num_positions, num_accepted = counted, num_accepted * counted / num_positions
        before, self._before = self._before, (num_positions, num_accepted)
        if before is None:
            return
        positions, accepted = num_positions + before[0], num_accepted + before[1]
        rate = min(0.98, max(0.02, accepted / positions))
        chance = rate * (1.0 - rate) * (1.0 / num_positions + 1.0 / before[0])
        ratio = (num_accepted / num_positions - before[1] / before[0]) ** 2 / chance
        self._requests += 1
        share = max(0.1, 1.0 / self._requests)
        self._ratio += share * (min(ratio, _MOST_DISPERSION) - self._ratio)
        self._positions += share * (2.0 / (1.0 / num_positions + 1.0 / before[0]) - self._positions)

    @property
    def learned(self) -> tuple[float, float, int]:
        return self._ratio, self._positions, self._requests

    @classmethod
    def restored(cls, learned: tuple[float, float, int]) -> "Dispersion":
        return cls(*learned)

    @property
    def ratio(self) -> float:
        return max(1.0, self._ratio)

    @property
    def prior_positions(self) -> float:
        """How many of a request's own positions the table's rate is worth as a guess of its rate."""
        if self.ratio <= 1.0:
            return MOST_PRIOR_POSITIONS
        return min(MOST_PRIOR_POSITIONS, max(_LEAST_PRIOR_POSITIONS, self._positions / (self.ratio - 1.0)))


def shift_rate(rate: float, difference: float) -> float:
    """By a difference in log-odds."""
    return 1.0 / (1.0 + math.exp(-log_odds(rate) - difference))


def log_odds(rate: float) -> float:
    bounded = max(_LEAST_RATE, min(1.0 - _LEAST_RATE, rate))
    return math.log(bounded / (1.0 - bounded))


def _log_likelihood(successes: float, trials: float) -> float:
    """Of the trials at their own rate."""
    failures = trials - successes
    of_successes = successes * math.log(successes / trials) if successes > 0.0 else 0.0
    return of_successes + (failures * math.log(failures / trials) if failures > 0.0 else 0.0)
