"""Which chain with which windows takes the least time per token, by the table as it is now. Pure.

A production of level i (router/renewal.py) costs its calls of the level below, one batch of E[L] + 1 rows and one hop.
When a level accepts all it held, the levels below it lack one row more than otherwise (the level's own token), which
is added there. That errors of levels fall together is known for three levels that follow one another: how often the
third accepts what the second accepted from the first. Positions are taken to be independent, but for a draft's.

The search: every subset of the levels that ends in the target; per chain, the last window is found by one sweep and the
others by hill climbing, from the windows that were best before, else from the best ones of the chain without its
target. Productions are shared by all chains that begin alike.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from operator import mul

from router.renewal import Production, checked, sweep
from router.snapshot import TableSnapshot


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


Chain = tuple[str, ...]
Windows = tuple[int, ...]


class Planner:
    """Plans over one snapshot; keeps every production it computed, so make a new one for a new snapshot.

    `found`: the best windows of each chain by planners before, where the search begins; it is kept up to date.
    """

    def __init__(
        self, snapshot: TableSnapshot, max_window: int, found: MutableMapping[Chain, Windows] | None = None
    ) -> None:
        assert max_window >= 1, "a window holds at least one token"
        self._snapshot = snapshot
        self._max_window = max_window
        self._found: MutableMapping[Chain, Windows] = {} if found is None else found
        self._productions: dict[tuple[Chain, Windows], Production] = {}
        self._best: dict[Chain, Plan] = {}
        self._costs: dict[Chain, _CheckCost] = {}

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
            self._best[key] = best = self._search(key)
            self._found[key] = best.windows
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
        begin = self._found[chain][:-1] if chain in self._found else self.best(chain[:-1]).windows
        best = self._best_last_window(chain, begin)
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

    def _steps(self, windows: Windows) -> Iterator[tuple[int, ...]]:
        for i, window in enumerate(windows):
            for changed in (window - 1, window + 1):
                if 1 <= changed <= self._max_window:
                    yield (*windows[:i], changed, *windows[i + 1 :])

    def _all_windows(self) -> range:
        return range(1, self._max_window + 1)

    def _plan(self, chain: Chain, windows: Windows) -> Plan:
        return Plan(chain, windows, self.predict(chain, windows))

    def _best_last_window(self, chain: Chain, inner: Windows) -> Plan:
        """All values of the last window at once: only means are needed at the target."""
        lower = self._production(chain[:-1], inner)
        means = sweep(lower, self._snapshot.rates(*chain[-3:]), self._max_window)
        check = self._check_cost(chain)
        best_ms, best_window = float("inf"), 1
        for i, delivered in enumerate(means.delivered):
            time_ms = means.calls[i] * lower.time_ms + check.of(means.held_tokens[i], means.all_kept[i])
            if time_ms / delivered < best_ms:
                best_ms, best_window = time_ms / delivered, i + 1
        return Plan(chain, (*inner, best_window), best_ms + self._join_ms(chain))

    def _production(self, chain: Chain, windows: Windows) -> Production:
        key = (chain, windows)
        if key not in self._productions:
            self._productions[key] = self._first_check(chain, windows[0]) if len(chain) == 2 else self._collected(*key)
        return self._productions[key]

    def _first_check(self, chain: Chain, window: int) -> Production:
        """Level 2 checks exactly what one draft brought: `window` tokens, or fewer where the drafter had no guess."""
        drafter = self._snapshot.models[chain[0]]
        goes_on = self._snapshot.draft_goes_on(chain[0], chain[1], window)
        continues = [max(pair) for pair in zip(self._snapshot.draft_continues(chain[0], window), goes_on, strict=True)]
        reached = tuple(accumulate(continues, mul, initial=1.0))
        accepted = tuple(accumulate(goes_on, mul, initial=1.0))
        draft_ms = sum(reached[:-1]) * drafter.batch_ms(1.0) + drafter.call_ms
        ended = [
            so_far * min(1.0 - more_drafted, 1.0 - more_accepted)
            for so_far, more_drafted, more_accepted in zip(accepted, continues, goes_on, strict=False)
        ]
        extended = (*ended, accepted[-1])
        corrected = [so_far - more - end for so_far, more, end in zip(accepted, accepted[1:], ended, strict=False)]
        check_ms = self._check_cost(chain).of(sum(reached[1:]), sum(extended))
        return Production((*corrected, 0.0), extended, draft_ms + check_ms)

    def _collected(self, chain: Chain, windows: Windows) -> Production:
        lower = self._production(chain[:-1], windows[:-1])
        rates = self._snapshot.rates(*chain[-3:])
        means = sweep(lower, rates, windows[-1])
        check_ms = self._check_cost(chain).of(means.held_tokens[-1], means.all_kept[-1])
        return checked(lower, rates, windows[-1], means.calls[-1] * lower.time_ms + check_ms)

    def _check_cost(self, chain: Chain) -> "_CheckCost":
        if chain not in self._costs:
            checker = self._snapshot.models[chain[-1]]
            catch_up_ms = sum(self._snapshot.models[name].row_ms for name in chain[:-1])
            self._costs[chain] = _CheckCost(checker.batch_ms(1.0) + checker.call_ms, checker.row_ms, catch_up_ms)
        return self._costs[chain]

    def _join_ms(self, chain: Sequence[str]) -> float:
        return sum(self._snapshot.models[name].join_ms for name in chain)

    def _alone_ms(self, target: str) -> float:
        cost = self._snapshot.models[target]
        return cost.batch_ms(1.0) + cost.call_ms


@dataclass(frozen=True, slots=True)
class _CheckCost:
    """One check by the last of a chain; `catch_up_ms`: the rows that full acceptance costs the levels below it."""

    call_ms: float
    row_ms: float
    catch_up_ms: float

    def of(self, held_tokens: float, all_kept: float) -> float:
        return self.call_ms + self.row_ms * held_tokens + self.catch_up_ms * all_kept


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
