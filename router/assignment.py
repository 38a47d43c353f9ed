"""Requests to drafters, all at once, so that an expert that all want is not swamped. Pure.

Each drafter has places; one more sequence in its batches makes every turn of all that share them longer, which the
place is charged with. Places are given by `scipy.optimize.linear_sum_assignment`: the sum over requests of what a
drafter is worth to a request, less what its place costs, is the largest there is. A request that drafts with several
drafters takes part once for each. What requests that are not asked for have stays theirs (`taken`).
Units: worth and costs are shares of a round's time. Letters: R requests, D drafters, P places of all of them.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import log
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from router.snapshot import ModelCost

NOT_TO_HAVE = -1e6
"""What a drafter is worth to a request that has it already, or cannot have it."""

GIVE_S = 0.1
MOST_ASSIGNED = 64
"""Requests that are given drafters anew at once, and how often: it takes some ms for so many. A new one gets its first
from what is left.
"""

NOBODY: Mapping[str, int] = MappingProxyType({})

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of one level's drafters for requests whose drafts have `window` tokens and whose checks take `check_ms`.

    `replicas`: how many a drafter has, one where it is not said.
    """

    costs: Mapping[str, ModelCost]
    window: float
    check_ms: float
    replicas: Mapping[str, int] = field(default_factory=dict)

    def is_scarce(self) -> bool:
        """Whether a drafter's batch takes longer the more share it."""
        return any(cost.per_token_ms + cost.per_sequence_ms > 0.0 for cost in self.costs.values())

    def place_cost(self, drafter: str, number: int) -> float:
        """What the `number`th sequence adds to the rounds of all that share the drafter, its own included."""
        cost = self.costs[drafter]
        added_ms, number = cost.per_token_ms + cost.per_sequence_ms, -(-number // self.replicas.get(drafter, 1))
        turn_ms = cost.base_ms + added_ms * number
        return self.window * (turn_ms + (number - 1) * added_ms) / (self.check_ms + self.window * turn_ms)

    def worth(self, acceptance: float) -> float:
        """Of a drafter whose tokens are accepted so often: the logarithm of a round's tokens."""
        bounded = min(0.99, max(0.01, acceptance))
        return log((1.0 - bounded ** (self.window + 1.0)) / (1.0 - bounded))


def assign(
    wishes: Sequence[Mapping[str, float]], capacity: Capacity, most: int, taken: Mapping[str, int] = NOBODY
) -> list[list[str]]:
    """Up to `most` drafters for each request, the best first; `wishes`: hoped acceptance by drafter, of each request.

    `taken`: places that others have. Every request gets one at least, and none that it does not wish.
    """
    drafters = sorted(capacity.costs)
    counts = {name: taken.get(name, 0) for name in drafters}
    worth = np.array(
        [[capacity.worth(wish[name]) if name in wish else NOT_TO_HAVE for name in drafters] for wish in wishes]
    )
    given: list[list[str]] = [[] for _ in wishes]
    for _ in range(min(most, len(drafters))):
        columns, costs = _places(drafters, counts, capacity, len(wishes))
        rows, chosen = linear_sum_assignment(worth[:, columns] - costs, maximize=True)
        for row, place in zip(rows, chosen, strict=True):
            column = columns[place]
            if worth[row, column] > NOT_TO_HAVE:
                given[row].append(drafters[column])
                counts[drafters[column]] += 1
                worth[row, column] = NOT_TO_HAVE
    return given


def _places(
    drafters: Sequence[str], taken: Mapping[str, int], capacity: Capacity, num_requests: int
) -> tuple[npt.NDArray[np.int64], Floats]:
    """[P] the drafter of each place that is left, and [P] what it costs: of each as many as all could want, but no more
    than four times its part of them, where that is fewer.
    """
    per_drafter = min(num_requests, 4 + 4 * -(-num_requests // len(drafters)))
    numbers = [(column, number) for column, name in enumerate(drafters) for number in range(per_drafter)]
    costs = [capacity.place_cost(drafters[column], taken[drafters[column]] + number + 1) for column, number in numbers]
    return np.array([column for column, _ in numbers], np.int64), np.array(costs)


class Given:
    """Which drafters of a level each request has; given anew every GIVE_S to those that have theirs for longest.

    A request is whatever stands for one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wishes: OrderedDict[Hashable, Mapping[str, float]] = OrderedDict()  # the one given to longest ago first
        self._drafters: dict[Hashable, list[str]] = {}
        self._taken: Counter[str] = Counter()
        self._given_s = clock()

    def __len__(self) -> int:
        return len(self._wishes)

    def get(self, request: Hashable, wish: Mapping[str, float], capacity: Capacity, most: int) -> list[str]:
        """Of the request, the best first."""
        self._wishes[request] = wish
        now_s = self._clock()
        if now_s - self._given_s >= GIVE_S:
            self._given_s = now_s
            self._give(list(islice(self._wishes, MOST_ASSIGNED)), capacity, most)
        if wish.keys().isdisjoint(self._drafters.get(request, ())):  # new, or all that it had are lost
            self._give([request], capacity, most)
        return [name for name in self._drafters[request] if name in wish]

    def forget(self, request: Hashable) -> None:
        self._wishes.pop(request, None)
        self._taken.subtract(self._drafters.pop(request, ()))

    def _give(self, requests: Sequence[Hashable], capacity: Capacity, most: int) -> None:
        for request in requests:
            self._taken.subtract(self._drafters.get(request, ()))
            self._wishes.move_to_end(request)
        given = assign([self._wishes[request] for request in requests], capacity, most, self._taken)
        for request, drafters in zip(requests, given, strict=True):
            self._drafters[request] = drafters
            self._taken.update(drafters)
