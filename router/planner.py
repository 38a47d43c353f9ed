"""Which chain with which windows takes the least time per token (router/prediction.py). Pure.

The search: every subset of the levels that ends in the target, and where it leaves out the cheapest level also with
that one as a tail; per chain, the last window is found by one sweep and the others by hill climbing, from where the
best was before, else from the best of the chain without its target. Productions are shared by all chains that begin
alike.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, product

from router.plan import GROUP, Chain, Plan, Tail
from router.prediction import Prediction
from router.snapshot import TableSnapshot

LEAST_GAIN, LEAST_CHANGE = 0.005, 0.02
LEAST_AHEAD_GAIN = 0.05
"""Of drafting ahead: most of it is thrown away, and where models share a machine it takes time of the check's."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A plan without its windows."""

    chain: Chain
    tail: str | None = None


Found = MutableMapping[Shape, Plan]


class Planner:
    """Plans over one snapshot.

    `found`: the best plan of each shape by planners before, where the search begins; it is kept up to date.
    `draft_ahead`: whether drafters may go on while their draft is checked.
    """

    def __init__(
        self, snapshot: TableSnapshot, max_window: int, found: Found | None = None, draft_ahead: bool = False
    ) -> None:
        assert max_window >= 1, "a window holds at least one token"
        self._snapshot = snapshot
        self._even, self._uneven = Prediction(snapshot), Prediction(snapshot.uneven())
        self._max_window = max_window
        self._draft_ahead = draft_ahead
        self._found: Found = {} if found is None else found
        self._best: dict[Shape, Plan] = {}

    def predict(self, chain: Sequence[str], windows: Sequence[int], tail: Tail | None = None) -> float:
        """Mean time per committed token in ms."""
        plan = Plan(tuple(chain), tuple(windows), 0.0, tail=tail)
        return self._prediction(plan).ms_per_token(plan)

    def _prediction(self, plan: Plan) -> Prediction:
        return self._even if self._even.keeps_step(plan) else self._uneven

    def best(self, chain: Sequence[str], tail: str | None = None) -> Plan:
        """The best windows of one chain."""
        shape = Shape(tuple(chain), tail)
        if shape not in self._best:
            self._best[shape] = self._found[shape] = self._search(shape)
        return self._best[shape]

    def best_tail(self, chain: Sequence[str], windows: Sequence[int], tail: str) -> Plan:
        """The best window of a tail where all others are given."""
        plans = (
            self._with_prediction(Plan(tuple(chain), tuple(windows), 0.0, tail=Tail(tail, window)))
            for window in range(1, self._max_window + 1)
        )
        return min(plans, key=lambda plan: plan.predicted_ms_per_token)

    def with_stop(self, plan: Plan) -> Plan:
        """`stop_below` where one more drafted token costs its checker as much as it saves: a row, against a token
        otherwise had. A tail goes on where the first drafter's part is right.
        """
        if len(plan.chain) == 1:
            return plan
        row_ms = self._snapshot.models[plan.chain[1]].row_ms
        stop_below = row_ms / max(1e-9, self.predict(plan.chain[:2], plan.windows[:1], plan.tail))
        tail = plan.tail
        if tail is not None:
            right = 1.0
            for rate in self._snapshot.draft_goes_on(plan.chain[0], plan.chain[1], plan.windows[0]):
                right *= rate
            tail = replace(tail, stop_below=min(1.0, stop_below / max(1e-9, right)))
        return replace(plan, stop_below=min(1.0, stop_below), tail=tail, keeps_step=self._even.keeps_step(plan))

    def choose(self, models: Sequence[str], present: Plan | None = None, slo_ms_per_token: float | None = None) -> Plan:
        """The fastest candidate; with a target for its time, the one that leaves most room for other requests among
        those predicted to keep it. `present`, predicted afresh, stays where the gain is below `LEAST_CHANGE`.
        """
        price = partial(self._price, slo_ms_per_token=slo_ms_per_token)
        best = min(self.candidates(models), key=price)
        if present is None or not {*present.drafters, present.chain[-1]} <= set(models):
            return best
        present = self._with_prediction(present)
        (best_missed, best_cost), (present_missed, present_cost) = price(best), price(present)
        changes = best_missed < present_missed or best_cost <= (1.0 - LEAST_CHANGE) * present_cost
        return best if changes else present

    def _price(self, plan: Plan, slo_ms_per_token: float | None) -> tuple[bool, float]:
        """Whether it misses the target, and its cost. Each further level must gain `LEAST_GAIN`, for it can also fail
        or stall.
        """
        time_ms = plan.predicted_ms_per_token
        is_missed = slo_ms_per_token is not None and time_ms > slo_ms_per_token
        cost = time_ms if slo_ms_per_token is None or is_missed else self._prediction(plan).busy_ms(plan)
        return is_missed, cost * (1.0 + LEAST_GAIN) ** len(plan.drafters)

    def candidates(self, models: Sequence[str]) -> list[Plan]:
        """The best plan of every shape from `models` (cheapest first, target last), fastest first."""
        plans = (self.best(shape.chain, shape.tail) for shape in self._shapes(models))
        return sorted(plans, key=lambda plan: plan.predicted_ms_per_token)

    def _shapes(self, models: Sequence[str]) -> list[Shape]:
        """Short chains first; of each level none or one."""
        *lower, target = models
        levels = {name: self._snapshot.models[name].level for name in models}
        cheapest = next((name for name in lower if GROUP not in name), target)
        choices = [(None, *names) for _, names in groupby(lower, key=levels.__getitem__)]
        chains = [(*(name for name in chosen if name is not None), target) for chosen in product(*choices)]
        shapes = []
        for chain in sorted(chains, key=len):
            shapes.append(Shape(chain))
            if levels[cheapest] < levels[chain[0]] < levels[target]:
                shapes.append(Shape(chain, cheapest))
        return shapes

    def _search(self, shape: Shape) -> Plan:
        if len(shape.chain) <= 2 and shape.tail is None:
            return self._exhaustive(shape.chain)
        best = self._with_last_window(self._begin(shape))
        tried = {_climbed(best)}
        while (better := self._first_better(best, tried)) is not None:
            best = better
        return best

    def _exhaustive(self, chain: Chain) -> Plan:
        if len(chain) == 1:
            return self._with_prediction(Plan(chain, (), 0.0))
        even, uneven = (each.by_window(chain, self._max_window) for each in (self._even, self._uneven))
        in_turn = [e.in_turn_ms if e.keeps_step else u.in_turn_ms for e, u in zip(even, uneven, strict=True)]
        least_ms = min(in_turn)
        best = Plan(chain, (in_turn.index(least_ms) + 1,), least_ms)
        if not (self._draft_ahead and self._even.can_go_on(chain)):
            return best
        ahead = [times.ahead_ms for times in uneven]
        least_ahead_ms = min(ahead)
        gains = least_ahead_ms <= (1.0 - LEAST_AHEAD_GAIN) * least_ms
        return Plan(chain, (ahead.index(least_ahead_ms) + 1,), least_ahead_ms, goes_on=True) if gains else best

    def _begin(self, shape: Shape) -> Plan:
        chain, tail = shape.chain, None
        if shape in self._found:
            return self._found[shape]
        if shape.tail is not None:
            tail = Tail(shape.tail, self.best((shape.tail, chain[1])).windows[0])
        windows = (*self.best(chain[:-1]).windows, 1) if len(chain) > 2 else self.best(chain).windows
        return Plan(chain, windows, 0.0, tail=tail)

    def _first_better(self, best: Plan, tried: set[tuple[int, ...]]) -> Plan | None:
        for step in self._steps(best):
            if _climbed(step) not in tried:
                tried.add(_climbed(step))
                plan = self._with_last_window(step)
                if plan.predicted_ms_per_token < best.predicted_ms_per_token:
                    return plan
        return None

    def _steps(self, plan: Plan) -> Iterator[Plan]:
        """One of the windows that are climbed is changed by one, a tail's also by two."""
        for i, window in enumerate(plan.windows[: max(1, len(plan.windows) - 1)]):
            for changed in (window - 1, window + 1):
                if 1 <= changed <= self._max_window:
                    yield replace(plan, windows=(*plan.windows[:i], changed, *plan.windows[i + 1 :]))
        if plan.tail is not None:
            for change in (-1, 1, -2, 2):
                if 1 <= plan.tail.window + change <= self._max_window:
                    yield replace(plan, tail=replace(plan.tail, window=plan.tail.window + change))

    def _with_last_window(self, plan: Plan) -> Plan:
        """The best last window, where it does not count as climbed, and the prediction."""
        if len(plan.chain) == 2:
            return self._with_prediction(plan)
        times = self._prediction(plan).by_last_window(plan, self._max_window)
        least = min(range(len(times)), key=times.__getitem__)
        return replace(plan, windows=(*plan.windows[:-1], least + 1), predicted_ms_per_token=times[least])

    def _with_prediction(self, plan: Plan) -> Plan:
        return replace(plan, predicted_ms_per_token=self._prediction(plan).ms_per_token(plan))


def _climbed(plan: Plan) -> tuple[int, ...]:
    windows = plan.windows if len(plan.chain) == 2 else plan.windows[:-1]
    return windows if plan.tail is None else (*windows, plan.tail.window)
