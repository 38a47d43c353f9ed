"""What a plan takes per committed token, by the table as it is now. Pure.

A production of level i (router/renewal.py) costs its calls of the level below, one batch of E[L] + 1 rows and one hop.
When a level accepts all it held, the levels below it lack one row more than otherwise (the level's own token), which
is added there. That errors of levels fall together is known for three levels that follow one another: how often the
third accepts what the second accepted from the first. Positions are taken to be independent, but for a draft's.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import mul

from router.plan import Chain, Plan, Tail, Windows, members_of
from router.renewal import Production, Rates, Sweep, checked, sweep
from router.snapshot import TableSnapshot

BUSY_BATCHES = 0.5
"""A drafter whose steps wait for as many of its batches has no time to draft what may be thrown away."""


MOST_BASE = 0.5
"""Of a batch, for batches of a part of the requests to be worth about as much less."""


@dataclass(frozen=True, slots=True)
class _CheckCost:
    """One check by the last of a chain; `catch_up_ms`: the rows that full acceptance costs the levels below it."""

    call_ms: float
    row_ms: float
    catch_up_ms: float

    def of(self, held_tokens: float, all_kept: float) -> float:
        return self.call_ms + self.row_ms * held_tokens + self.catch_up_ms * all_kept


@dataclass(frozen=True, slots=True)
class _Draft:
    """`goes_on[j]`: the probability that after j accepted tokens one more is drafted and accepted, `continues[j]`: that
    after j tokens one more is drafted at all; `reached[j]`: that j are; `time_ms`: to draft.
    """

    goes_on: list[float]
    continues: list[float]
    reached: list[float]
    time_ms: float


@dataclass(frozen=True, slots=True)
class WindowTimes:
    """Of a chain of two with one window, in ms per token: where drafters wait for the check of their draft, and where
    they go on meanwhile. `keeps_step`: of the first, as `Prediction.keeps_step`.
    """

    in_turn_ms: float
    ahead_ms: float
    keeps_step: bool


class Prediction:
    """Over one snapshot; keeps every production it computed, so make a new one for a new snapshot."""

    def __init__(self, snapshot: TableSnapshot) -> None:
        self._snapshot = snapshot
        self._productions: dict[tuple[Chain, Windows, Tail | None], Production] = {}
        self._drafts: dict[tuple[Chain, int, Tail | None], _Draft] = {}
        self._costs: dict[Chain, _CheckCost] = {}

    def ms_per_token(self, plan: Plan) -> float:
        chain, windows = plan.chain, plan.windows
        assert len(windows) == len(chain) - 1, "a chain of n levels has n − 1 windows"
        if len(chain) == 1:
            cost = self._snapshot.models[chain[0]]
            return cost.call_ms(1.0)
        production = self._production(chain, windows, plan.tail)
        time_ms = production.time_ms - (self._hidden_ms(plan) if plan.goes_on else 0.0)
        return time_ms / production.mean_tokens + self._join_ms(plan)

    def keeps_step(self, plan: Plan) -> bool:
        """Whether drafts are back before a checker that waits for them, for as long as its base, begins without them
        (models/gathering.py).
        """
        if len(plan.chain) != 2 or plan.goes_on:
            return len(plan.chain) == 1
        checker = self._snapshot.models[plan.chain[1]]
        return self._whole_draft(plan.chain, plan.windows[0], plan.tail).time_ms + checker.hop_ms < checker.base_ms

    def can_go_on(self, chain: Chain) -> bool:
        """Whether that would gain: drafters have time for drafts that may be thrown away, and requests that come back
        to the checker at different times do not cost it batches of which each takes as long as one for all.
        """
        models = self._snapshot.models
        if len(chain) != 2 or any(models[name].queue_batches >= BUSY_BATCHES for name in members_of(chain[0])):
            return False
        checker = models[chain[1]]
        return self._snapshot.num_open == 1 or checker.base_ms <= MOST_BASE * checker.batch_ms(1.0)

    def _hidden_ms(self, plan: Plan) -> float:
        chain, window = plan.chain, plan.windows[0]
        draft = self._whole_draft(chain, window, None)
        check_ms = self._production(chain, plan.windows, None).time_ms - draft.time_ms
        guessed = prod(self._snapshot.draft_goes_on(chain[0], chain[1], window + 1))
        turn_ms = self._snapshot.models[chain[0]].call_ms(1.0)
        return guessed * _meanwhile_ms(window, turn_ms, draft.time_ms, check_ms)

    def busy_ms(self, plan: Plan) -> float:
        """Of a replica's time, what a committed token takes of the model that it takes most of: where many requests
        wait, this bounds how many tokens there can be. A batch's base is shared by the sequences in it.
        """
        chain, calls, most = plan.chain, 1.0, 0.0
        for level in range(len(chain) - 1, 1, -1):
            lower = self._production(chain[:level], plan.windows[: level - 1], plan.tail)
            window = plan.windows[level - 1]
            means = sweep(lower, self._rates(chain[: level + 1], plan.windows, plan.tail), window)
            most = max(most, calls * self._share_ms(chain[level], 1.0, means.held_tokens[-1] + 1.0))
            calls *= means.calls[-1]
        if len(chain) == 1:
            return self._share_ms(chain[0], 1.0, 1.0)
        draft = self._draft(chain[0], chain[1], plan.windows[0])
        steps = {chain[0]: sum(draft.reached[:-1])}
        num_drafted = sum(draft.reached[1:])
        if plan.tail is not None:
            rest = self._draft(plan.tail.model, chain[1], plan.tail.window)
            steps[plan.tail.model] = draft.reached[-1] * sum(rest.reached[:-1])
            num_drafted += draft.reached[-1] * sum(rest.reached[1:])
        loads = [self._share_ms(name, number, 1.0) for name, number in steps.items()]
        most = max(most, calls * max(*loads, self._share_ms(chain[1], 1.0, num_drafted + 1.0)))
        return most / self._production(chain, plan.windows, plan.tail).mean_tokens

    def by_window(self, chain: Chain, max_window: int) -> list[WindowTimes]:
        """For every window 1 … `max_window` of a chain of two, in one pass over the positions of the longest draft."""
        drafter, checker = (self._snapshot.models[name] for name in chain)
        cost, join_ms = self._check_cost(chain), self._join_ms(Plan(chain, (1,), 0.0))
        goes_on = self._snapshot.draft_goes_on(chain[0], chain[1], max_window + 1)
        continues = map(max, self._snapshot.draft_continues(chain[0], max_window), goes_on)
        batch_ms, call_ms, most_ms = drafter.batch_ms(1.0), drafter.call_ms(1.0), checker.base_ms - checker.hop_ms
        times = []
        accepted, reached, draft_ms = 1.0, 1.0, call_ms
        num_drafted, ended, num_tokens = 0.0, 0.0, 1.0
        for window, (more_accepted, more_drafted) in enumerate(zip(goes_on, continues, strict=False), 1):
            if window > 1:
                draft_ms += reached * batch_ms
            ended += accepted * min(1.0 - more_drafted, 1.0 - more_accepted)
            accepted *= more_accepted
            reached *= more_drafted
            num_drafted += reached
            num_tokens += accepted
            check_ms = cost.of(num_drafted, ended + accepted)
            hidden_ms = accepted * goes_on[window] * _meanwhile_ms(window, call_ms, draft_ms, check_ms)
            in_turn_ms = (draft_ms + check_ms) / num_tokens + join_ms
            times.append(WindowTimes(in_turn_ms, in_turn_ms - hidden_ms / num_tokens, draft_ms < most_ms))
        return times

    def by_last_window(self, plan: Plan, max_window: int) -> list[float]:
        """Time per token for every value 1 … `max_window` of the last window of a chain of three or more: only means
        are needed at the target.
        """
        chain = plan.chain
        lower = self._production(chain[:-1], plan.windows[: len(chain) - 2], plan.tail)
        means = sweep(lower, self._rates(plan.chain, plan.windows, plan.tail), max_window)
        join_ms = self._join_ms(plan)
        return [self._check_ms(chain, lower, means, i) / means.delivered[i] + join_ms for i in range(max_window)]

    def _production(self, chain: Chain, windows: Windows, tail: Tail | None) -> Production:
        key = (chain, windows, tail)
        if key not in self._productions:
            made = self._first_check(chain, windows[0], tail) if len(chain) == 2 else self._collected(*key)
            self._productions[key] = made
        return self._productions[key]

    def _first_check(self, chain: Chain, window: int, tail: Tail | None) -> Production:
        """Level 2 checks exactly what one draft brought: all that was asked for, or less where there was no guess."""
        draft = self._whole_draft(chain, window, tail)
        accepted = tuple(accumulate(draft.goes_on, mul, initial=1.0))
        ended = [
            so_far * min(1.0 - more_drafted, 1.0 - more_accepted)
            for so_far, more_drafted, more_accepted in zip(accepted, draft.continues, draft.goes_on, strict=False)
        ]
        extended = (*ended, accepted[-1])
        corrected = [so_far - more - end for so_far, more, end in zip(accepted, accepted[1:], ended, strict=False)]
        check_ms = self._check_cost(chain).of(sum(draft.reached[1:]), sum(extended))
        return Production((*corrected, 0.0), extended, draft.time_ms + check_ms)

    def _whole_draft(self, chain: Chain, window: int, tail: Tail | None) -> _Draft:
        """What level 2 gets to check."""
        key = (chain[:2], window, tail)
        if key not in self._drafts:
            draft = self._draft(chain[0], chain[1], window)
            self._drafts[key] = draft if tail is None else self._with_tail(draft, chain, tail)
        return self._drafts[key]

    def _draft(self, drafter: str, checker: str, window: int) -> _Draft:
        cost = self._snapshot.models[drafter]
        goes_on = self._snapshot.draft_goes_on(drafter, checker, window)
        continues = [max(pair) for pair in zip(self._snapshot.draft_continues(drafter, window), goes_on, strict=True)]
        reached = list(accumulate(continues, mul, initial=1.0))
        return _Draft(goes_on, continues, reached, cost.call_ms(1.0) + sum(reached[1:-1]) * cost.batch_ms(1.0))

    def _with_tail(self, head: _Draft, chain: Chain, tail: Tail) -> _Draft:
        """Both drafters compute what the other drafted as well, where it was accepted."""
        rest = self._draft(tail.model, chain[1], tail.window)
        begun = head.reached[-1]
        first, second = (self._snapshot.models[name] for name in (chain[0], tail.model))
        accepted = list(accumulate((*head.goes_on, *rest.goes_on), mul, initial=1.0))
        num_head = len(head.goes_on)
        rows_ms = first.row_ms * sum(accepted[num_head + 1 :]) + second.row_ms * sum(accepted[1 : num_head + 1])
        return _Draft(
            [*head.goes_on, *rest.goes_on],
            [*head.continues, *rest.continues],
            [*head.reached, *(begun * reached for reached in rest.reached[1:])],
            head.time_ms + begun * rest.time_ms + rows_ms,
        )

    def _collected(self, chain: Chain, windows: Windows, tail: Tail | None) -> Production:
        lower = self._production(chain[:-1], windows[:-1], tail)
        rates = self._rates(chain, windows, tail)
        means = sweep(lower, rates, windows[-1])
        return checked(lower, rates, windows[-1], self._check_ms(chain, lower, means, windows[-1] - 1))

    def _rates(self, chain: Chain, windows: Windows, tail: Tail | None) -> Rates:
        """How the last of the chain accepts what the one before it delivers."""
        rates = self._snapshot.rates(*chain[-3:])
        if tail is None or len(chain) > 3:
            return rates
        return replace(rates, head=windows[0], tail=self._snapshot.rates(tail.model, *chain[-2:]))

    def _check_ms(self, chain: Chain, lower: Production, means: Sweep, i: int) -> float:
        """A call of the last of the chain with everything below it."""
        return means.calls[i] * lower.time_ms + self._check_cost(chain).of(means.held_tokens[i], means.all_kept[i])

    def _check_cost(self, chain: Chain) -> _CheckCost:
        if chain not in self._costs:
            checker = self._snapshot.models[chain[-1]]
            catch_up_ms = sum(self._snapshot.models[name].row_ms for name in chain[:-1])
            self._costs[chain] = _CheckCost(checker.call_ms(1.0), checker.row_ms, catch_up_ms)
        return self._costs[chain]

    def _share_ms(self, model: str, batches: float, rows: float) -> float:
        """A sequence's share of its model's batches, each with `rows` of its rows."""
        cost = self._snapshot.models[model]
        return batches * (cost.base_ms / cost.sharing + cost.per_token_ms * rows + cost.per_sequence_ms)

    def _join_ms(self, plan: Plan) -> float:
        return sum(self._snapshot.models[name].join_ms for name in (*plan.drafters, plan.chain[-1]))


def _meanwhile_ms(window: int, turn_ms: float, draft_ms: float, check_ms: float) -> float:
    """Of a round's draft, what is made during the check before it, where that accepts everything and its own token is
    guessed. It is made position by position, each with the way there and back.
    """
    left_ms = max(0.0, (window + 1) * turn_ms - check_ms)
    return max(0.0, draft_ms - left_ms)
