"""Which chain with which windows takes the least time per token, by the table as it is now. Pure.

A production of level i (router/renewal.py) costs its calls of the level below, one batch of E[L] + 1 rows and one hop.
When a level accepts all it held, the levels below it lack one row more than otherwise (the level's own token), which
is added there. Exact where positions are independent; that errors of several levels fall together is not modelled.

The search: every subset of the levels that ends in the target; per chain, the last window is found by one sweep and the
others by hill climbing from the best windows of the chain without its target. Productions are shared by all chains that
begin alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from operator import mul

from router.renewal import Production, checked_survival, delivered, sweep
from router.table import TableSnapshot


@dataclass(frozen=True, slots=True)
class Plan:
    """`windows[i]` belongs to `chain[i + 1]`; the target alone has none.

    `stop_below`: a drafter that knows how likely its tokens are right ends a draft that would be right with a smaller
    probability.
    """

    chain: tuple[str, ...]
    windows: tuple[int, ...]
    predicted_ms_per_token: float
    stop_below: float = 0.0


class Planner:
    """Plans over one snapshot; keeps every production it computed, so make a new one for a new snapshot."""

    def __init__(self, snapshot: TableSnapshot, max_window: int) -> None:
        assert max_window >= 1, "a window holds at least one token"
        self._snapshot = snapshot
        self._max_window = max_window
        self._productions: dict[tuple[tuple[str, ...], tuple[int, ...]], Production] = {}
        self._best: dict[tuple[str, ...], Plan] = {}

    def predict(self, chain: Sequence[str], windows: Sequence[int]) -> float:
        """Mean time per committed token in ms."""
        assert len(windows) == len(chain) - 1, "a chain of n levels has n − 1 windows"
        if len(chain) == 1:
            return self._alone_ms(chain[0])
        production = self._production(tuple(chain), tuple(windows))
        return production.time_ms / production.mean_tokens + self._join_ms(chain)

    def best(self, chain: Sequence[str]) -> Plan:
        """The best windows of one chain."""
        key = tuple(chain)
        if key not in self._best:
            self._best[key] = self._search(key)
        return self._best[key]

    def with_stop(self, plan: Plan) -> Plan:
        """`stop_below` where one more drafted token costs its checker as much as it saves: a row, against a token
        otherwise had.
        """
        if len(plan.chain) == 1:
            return plan
        row_ms = self._snapshot.models[plan.chain[1]].row_ms
        return replace(plan, stop_below=min(1.0, row_ms / self.predict(plan.chain[:2], plan.windows[:1])))

    def candidates(self, models: Sequence[str]) -> list[Plan]:
        """The best plan of every chain from `models` (cheapest first, target last), fastest first."""
        return sorted((self.best(chain) for chain in self._chains(models)), key=lambda p: p.predicted_ms_per_token)

    def _chains(self, models: Sequence[str]) -> Iterator[tuple[str, ...]]:
        *lower, target = models
        levels = {name: self._snapshot.models[name].level for name in models}
        for length in range(len(lower) + 1):
            for subset in combinations(lower, length):
                chain = (*subset, target)
                if all(levels[a] < levels[b] for a, b in pairwise(chain)):
                    yield chain

    def _search(self, chain: tuple[str, ...]) -> Plan:
        if len(chain) == 1:
            return Plan(chain, (), self._alone_ms(chain[0]))
        if len(chain) == 2:
            return min((self._plan(chain, (w,)) for w in self._all_windows()), key=lambda p: p.predicted_ms_per_token)
        best = self._best_last_window(chain, self.best(chain[:-1]).windows)
        tried = {best.windows[:-1]}
        while (better := self._first_better(best, tried)) is not None:
            best = better
        return best

    def _first_better(self, best: Plan, tried: set[tuple[int, ...]]) -> Plan | None:
        for step in self._steps(best.windows[:-1]):
            if step not in tried:
                tried.add(step)
                plan = self._best_last_window(best.chain, step)
                if plan.predicted_ms_per_token < best.predicted_ms_per_token:
                    return plan
        return None

    def _steps(self, windows: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for i, window in enumerate(windows):
            for changed in (window - 1, window + 1):
                if 1 <= changed <= self._max_window:
                    yield (*windows[:i], changed, *windows[i + 1 :])

    def _all_windows(self) -> range:
        return range(1, self._max_window + 1)

    def _plan(self, chain: tuple[str, ...], windows: tuple[int, ...]) -> Plan:
        return Plan(chain, windows, self.predict(chain, windows))

    def _best_last_window(self, chain: tuple[str, ...], inner: tuple[int, ...]) -> Plan:
        """All values of the last window at once: only means are needed at the target."""
        lower = self._production(chain[:-1], inner)
        acceptance = self._snapshot.acceptance(chain[-2], chain[-1])
        means = sweep(lower, acceptance, self._max_window)
        best_ms, best_window = float("inf"), 1
        for i, (calls, held, equal) in enumerate(zip(means.calls, means.held_tokens, means.all_equal, strict=True)):
            time_ms = calls * lower.time_ms + self._check_ms(chain, held, equal)
            ms_per_token = time_ms / delivered(acceptance, equal, held)
            if ms_per_token < best_ms:
                best_ms, best_window = ms_per_token, i + 1
        return Plan(chain, (*inner, best_window), best_ms + self._join_ms(chain))

    def _production(self, chain: tuple[str, ...], windows: tuple[int, ...]) -> Production:
        key = (chain, windows)
        if key not in self._productions:
            self._productions[key] = self._first_check(chain, windows[0]) if len(chain) == 2 else self._collected(*key)
        return self._productions[key]

    def _first_check(self, chain: tuple[str, ...], window: int) -> Production:
        """Level 2 checks exactly what one draft brought: `window` tokens, or fewer where the drafter had no guess."""
        drafter = self._snapshot.models[chain[0]]
        goes_on = self._snapshot.draft_goes_on(chain[0], chain[1], window)
        continues = [max(pair) for pair in zip(self._snapshot.draft_continues(chain[0], window), goes_on, strict=True)]
        reached = tuple(accumulate(continues, mul, initial=1.0))
        survival = tuple(accumulate(goes_on, mul, initial=1.0))
        draft_ms = sum(reached[:-1]) * drafter.batch_ms(1.0) + drafter.call_ms
        all_equal = survival[-1] + sum(
            accepted * min(1.0 - more_drafted, 1.0 - more_accepted)
            for accepted, more_drafted, more_accepted in zip(survival, continues, goes_on, strict=False)
        )
        return Production(survival, draft_ms + self._check_ms(chain, sum(reached[1:]), all_equal))

    def _collected(self, chain: tuple[str, ...], windows: tuple[int, ...]) -> Production:
        lower = self._production(chain[:-1], windows[:-1])
        acceptance = self._snapshot.acceptance(chain[-2], chain[-1])
        means = sweep(lower, acceptance, windows[-1])
        time_ms = means.calls[-1] * lower.time_ms + self._check_ms(chain, means.held_tokens[-1], means.all_equal[-1])
        return Production(checked_survival(lower, acceptance, windows[-1]), time_ms)

    def _check_ms(self, chain: tuple[str, ...], held_tokens: float, all_equal: float) -> float:
        """One check by the last of `chain`, with the rows that full acceptance costs the levels below it."""
        checker = self._snapshot.models[chain[-1]]
        catch_up_ms = all_equal * sum(self._snapshot.models[name].row_ms for name in chain[:-1])
        return checker.batch_ms(held_tokens + 1.0) + checker.call_ms + catch_up_ms

    def _join_ms(self, chain: Sequence[str]) -> float:
        return sum(self._snapshot.models[name].join_ms for name in chain)

    def _alone_ms(self, target: str) -> float:
        cost = self._snapshot.models[target]
        return cost.batch_ms(1.0) + cost.call_ms


def predict(snapshot: TableSnapshot, chain: Sequence[str], windows: Sequence[int]) -> float:
    """Mean time per committed token in ms."""
    return Planner(snapshot, max(windows, default=1)).predict(chain, windows)


def keep_or_change(snapshot: TableSnapshot, present: Plan | None, new: Plan, least_gain: float = 0.02) -> Plan:
    """Hysteresis: the present plan, predicted afresh, unless the new one gains at least `least_gain`.

    A present plan whose models are gone gives way.
    """
    if present is None or any(name not in snapshot.models for name in present.chain):
        return new
    present_ms = predict(snapshot, present.chain, present.windows)
    if new.predicted_ms_per_token <= (1.0 - least_gain) * present_ms:
        return new
    return Plan(present.chain, present.windows, present_ms)
