"""What a batch of a model costs, learned from the batches that ran: base + per_token × rows + per_sequence × sequences.

A message's `Timing` sums over its batches, and the cost is linear in batches, rows and sequences, so the sums are
fitted as they are. Units: ms. Old messages fade with a half-life of 64 messages. What the data cannot tell apart (at
one stream, batches and sequences are the same number) is decided by the prior, the profile that the replica measured
when it loaded.
"""

from dataclasses import dataclass

from kvstate.protocol import Profile, Timing

HALF_LIFE_MESSAGES = 64.0
_FADE = 0.5 ** (1.0 / HALF_LIFE_MESSAGES)
_PRIOR_WEIGHT = 0.1
_SOLVE_EACH, _SOLVE_EVERY = 16, 4
"""The fit is solved after each of the first messages, then after every fourth: solving takes longer than the rest."""

_LEAST_SHARE = 0.1
"""The prior counts as this fraction of a batch that measured each coefficient alone, relative to the coefficient: what
the data leave open is laid to the larger ones. One below the least share of a batch is held as one of that size.
"""


@dataclass(slots=True)
class Ewma:
    """A mean in which the newest value counts `share`; the first values count more, so that a start is no anchor.

    A value of less `weight` counts less: one of many that tell the same.
    """

    value: float = 0.0
    share: float = 0.05
    count: int = 0
    _weight: float = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        self.count += 1
        self._weight += weight
        self.value += (value - self.value) * min(1.0, max(self.share * weight, weight / self._weight))


class LatencyFit:
    """Exponentially weighted ridge regression towards a prior, with coefficients kept at or above zero.

    When costs leave the prediction for several messages by more than a third (a throttled or restarted machine), all
    coefficients are scaled by what was seen and most of the history is dropped.
    """

    def __init__(self, prior: Profile) -> None:
        self._prior = [prior.base_ms, prior.per_token_ms, prior.per_sequence_ms]
        self._gram = [[0.0] * 3 for _ in range(3)]
        self._moment = [0.0] * 3
        self._spread_ms = Ewma(share=0.1)
        self._excess = 0.0
        self._solution: list[float] | None = None
        self.count = 0

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """(base_ms, per_token_ms, per_sequence_ms)."""
        if self._solution is None:
            self._solution = self._solve()
        base_ms, per_token_ms, per_sequence_ms = self._solution
        return base_ms, per_token_ms, per_sequence_ms

    def observe(self, timing: Timing) -> float:
        """Take in the batches of one message; what they were expected to take, in ms. None say nothing."""
        if timing.batches <= 0:
            return 0.0
        rows, sequences = timing.rows / timing.batches, timing.sequences / timing.batches
        cost_ms, expected_ms = self._clipped(rows, sequences, timing.busy_s * 1e3 / timing.batches)
        features = (1.0, rows, sequences)
        for i, feature in enumerate(features):
            self._moment[i] = _FADE * self._moment[i] + feature * cost_ms
            self._gram[i] = [_FADE * old + feature * other for old, other in zip(self._gram[i], features, strict=True)]
        self.count += 1
        if self.count <= _SOLVE_EACH or self.count % _SOLVE_EVERY == 0:
            self._solution = None
        return expected_ms * timing.batches

    def take_over(self, timing: Timing) -> None:
        """From these batches on, be what they took: for batches that cannot have been so fast by chance."""
        self._rescale(timing.busy_s * 1e3 / self.predict_ms(timing))

    def predict_ms(self, timing: Timing) -> float:
        """Of all the batches of a message."""
        base_ms, per_token_ms, per_sequence_ms = self.coefficients
        return base_ms * timing.batches + per_token_ms * timing.rows + per_sequence_ms * timing.sequences

    def _clipped(self, rows: float, sequences: float, cost_ms: float) -> tuple[float, float]:
        """Of one batch, and what it was expected to cost. Limits how far one batch can pull; a lasting change moves the
        prediction itself.
        """
        base_ms, per_token_ms, per_sequence_ms = self.coefficients
        expected_ms = predicted_ms = base_ms + per_token_ms * rows + per_sequence_ms * sequences
        excess = (cost_ms - predicted_ms) / max(predicted_ms, 1e-6)
        self._excess += 0.1 * (min(1.0, max(-1.0, excess)) - self._excess)
        if abs(self._excess) > 0.33:
            predicted_ms *= 1.0 + self._excess
            self._rescale(1.0 + self._excess)
        limit_ms = 0.25 * predicted_ms + 3.0 * self._spread_ms.value + 0.05
        self._spread_ms.add(min(abs(cost_ms - predicted_ms), 2.0 * limit_ms))
        return min(max(cost_ms, predicted_ms - limit_ms), predicted_ms + limit_ms), expected_ms

    def _rescale(self, factor: float) -> None:
        self._prior = [factor * coefficient for coefficient in self.coefficients]
        self._gram = [[0.0] * 3 for _ in range(3)]
        self._moment = [0.0] * 3
        self._excess = 0.0
        self._solution = None

    def _solve(self) -> list[float]:
        """Least squares; a coefficient that comes out negative is held at zero and the others are solved again."""
        active = [0, 1, 2]
        batch_ms = max(1e-6, sum(self._prior))
        weights = [_PRIOR_WEIGHT / max(_LEAST_SHARE, prior / batch_ms) ** 2 for prior in self._prior]
        while True:
            values = _solve_linear(
                [[self._gram[i][j] + (weights[i] if i == j else 0.0) for j in active] for i in active],
                [self._moment[i] + weights[i] * self._prior[i] for i in active],
            )
            negative = [i for i, value in zip(active, values, strict=True) if value < 0.0]
            if not negative:
                return [values[active.index(i)] if i in active else 0.0 for i in range(3)]
            active = [i for i in active if i not in negative]


def _solve_linear(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination; `matrix` is symmetric positive definite and is used up."""
    n = len(right)
    for k in range(n):
        for i in range(k + 1, n):
            factor = matrix[i][k] / matrix[k][k]
            matrix[i] = [a - factor * b for a, b in zip(matrix[i], matrix[k], strict=True)]
            right[i] -= factor * right[k]
    solution = [0.0] * n
    for i in reversed(range(n)):
        solution[i] = (right[i] - sum(matrix[i][j] * solution[j] for j in range(i + 1, n))) / matrix[i][i]
    return solution
