"""Requests to drafters, all at once, so that an expert that all want is not swamped. Pure.

Each drafter has places; one more sequence in its batches makes every turn of all that share them longer, which the
place is charged with. Places are given by `scipy.optimize.linear_sum_assignment`: the sum over requests of what a
drafter is worth to a request, less what its place costs, is the largest there is. A request that drafts with several
drafters takes part once for each.
Units: worth and costs are shares of a round's time. Letters: R requests, D drafters, P places of all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from router.snapshot import ModelCost

TAKEN = -1e6
"""What a drafter is worth to a request that has it already."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of one level's drafters for requests whose drafts have `window` tokens and whose checks take `check_ms`."""

    costs: Mapping[str, ModelCost]
    window: float
    check_ms: float

    def is_scarce(self) -> bool:
        """Whether a drafter's batch takes longer the more share it."""
        return any(cost.per_token_ms + cost.per_sequence_ms > 0.0 for cost in self.costs.values())

    def place_cost(self, drafter: str, number: int) -> float:
        """What the `number`th sequence adds to the rounds of all that share the drafter, its own included."""
        cost = self.costs[drafter]
        added_ms = cost.per_token_ms + cost.per_sequence_ms
        turn_ms = cost.base_ms + added_ms * number
        return self.window * (turn_ms + (number - 1) * added_ms) / (self.check_ms + self.window * turn_ms)

    def worth(self, acceptance: float) -> float:
        """Of a drafter whose tokens are accepted so often: the logarithm of a round's tokens."""
        bounded = min(0.99, max(0.01, acceptance))
        return log((1.0 - bounded ** (self.window + 1.0)) / (1.0 - bounded))


def assign(wishes: Sequence[Mapping[str, float]], capacity: Capacity, most: int) -> list[list[str]]:
    """Up to `most` drafters for each request, the best first; `wishes`: hoped acceptance by drafter, of each request.

    Every request gets one, and as many as there are drafters at most.
    """
    drafters = sorted(capacity.costs)
    taken = dict.fromkeys(drafters, 0)
    worth = np.array([[capacity.worth(wish.get(name, 0.0)) for name in drafters] for wish in wishes])
    given: list[list[str]] = [[] for _ in wishes]
    for _ in range(min(most, len(drafters))):
        columns, costs = _places(drafters, taken, capacity, len(wishes))
        rows, chosen = linear_sum_assignment(worth[:, columns] - costs, maximize=True)
        for row, place in zip(rows, chosen, strict=True):
            column = columns[place]
            if worth[row, column] > TAKEN:
                given[row].append(drafters[column])
                taken[drafters[column]] += 1
                worth[row, column] = TAKEN
    return given


def _places(
    drafters: Sequence[str], taken: Mapping[str, int], capacity: Capacity, num_requests: int
) -> tuple[npt.NDArray[np.int64], Floats]:
    """[P] the drafter of each place that is left, and [P] what it costs: as many of each as all could want."""
    numbers = [(column, number) for column, name in enumerate(drafters) for number in range(num_requests)]
    costs = [capacity.place_cost(drafters[column], taken[drafters[column]] + number + 1) for column, number in numbers]
    return np.array([column for column, _ in numbers], np.int64), np.array(costs)
