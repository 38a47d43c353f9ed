"""The best static plan, by trying: every chain with a grid of windows, the slower ones dropped after each round. Pure.

A round of trials is a coroutine that is given a plan and the round's number and returns milliseconds per token; it
must ask the same prompts for all plans of a round, so that luck strikes all of them alike.
"""

import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.emulated_client import Wish, fixed
from benchmarks.oracle import chains

FIRST_WINDOWS = {1: (1, 2, 3, 4, 6, 9), 2: (2, 4, 7), 3: (2, 4)}
"""What the cheapest level drafts per call, by the number of windows."""
LATER_WINDOWS = {2: (2, 4, 8), 3: (3, 6)}
KEPT_SHARE = 1.0 / 3.0


@dataclass(frozen=True, slots=True)
class StaticPlan:
    chain: tuple[str, ...]
    windows: tuple[int, ...]

    @property
    def wish(self) -> Wish:
        return fixed(self.chain, self.windows)

    def __str__(self) -> str:
        return f"{'→'.join(self.chain)} {list(self.windows)}"


def grid(names: Sequence[str]) -> Iterator[StaticPlan]:
    """Every chain; later windows never fall: a level holds a whole draft at least, so a smaller one changes nothing."""
    for chain in chains(len(names)):
        members = tuple(names[i] for i in chain)
        num_windows = len(chain) - 1
        firsts = FIRST_WINDOWS.get(num_windows, (3,)) if num_windows else ()
        laters = [LATER_WINDOWS.get(num_windows, (6,))] * max(0, num_windows - 1)
        windows = itertools.product(firsts, *laters) if num_windows else [()]
        yield from (StaticPlan(members, w) for w in windows if list(w) == sorted(w))


def neighbours(plan: StaticPlan, max_window: int = 16) -> Iterator[StaticPlan]:
    """One window larger or smaller by one, or by a third where that is more."""
    for i, window in enumerate(plan.windows):
        step = max(1, window // 3)
        for changed in (window - step, window + step):
            if 1 <= changed <= max_window:
                yield StaticPlan(plan.chain, (*plan.windows[:i], changed, *plan.windows[i + 1 :]))


Trial = Callable[[StaticPlan, int], Awaitable[float]]


async def halving(plans: Sequence[StaticPlan], trial: Trial, rounds: int, survivors: int) -> list[StaticPlan]:
    """The best `survivors`, best first, judged by the sums of all their trials. The neighbours of the leader of the
    round before last join the last round, in which all are tried anew.
    """
    assert plans, "there is something to try"
    costs = dict.fromkeys(plans, 0.0)
    for turn in range(rounds - 1):
        for plan in costs:
            costs[plan] += await trial(plan, turn)
        ranked = sorted(costs, key=costs.__getitem__)
        kept = max(survivors, round(len(ranked) * KEPT_SHARE))
        costs = {plan: costs[plan] for plan in ranked[:kept]}
    leader = next(iter(costs))
    last = dict.fromkeys([*costs, *neighbours(leader)])
    final = {plan: await trial(plan, rounds - 1) for plan in last}
    return sorted(final, key=final.__getitem__)[:survivors]
