"""Plans that were made, by what they depend on. Planning takes the router's own time, which all rounds wait for: it is
given a share of it, and where that is used up, plans serve longer than they otherwise would.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from router.plan import Plan

FRESH_S, STALE_S = 0.25, 4.0
"""A plan is made anew when it is older than the first, if there is time, and in any case when older than the second."""

MOST_PLANS = 512
SHARE, IDLE_SHARE, MOST_SAVED_S = 0.03, 0.25, 0.02
"""Planning may take so much of the router's time, or of the time that the router is idle, where that is more; and how
much of it is saved up while there is nothing to plan.
"""


@dataclass(frozen=True, slots=True)
class _Made:
    plan: Plan
    at_s: float


class PlanCache:
    """`clock` tells ages; `work_clock` the processor time of the router's thread. Both in seconds."""

    def __init__(self, clock: Callable[[], float], work_clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._work_clock = work_clock
        self._made: OrderedDict[Hashable, _Made] = OrderedDict()
        self._saved_s = MOST_SAVED_S
        self._looked_s, self._worked_s = clock(), 0.0

    def __len__(self) -> int:
        return len(self._made)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._made

    def has_time(self) -> bool:
        """Whether planning has kept within its share up to now."""
        now_s, worked_s = self._clock(), self._work_clock()
        passed_s, busy_s = now_s - self._looked_s, worked_s - self._worked_s
        given_s = max(SHARE * passed_s, IDLE_SHARE * (passed_s - busy_s))
        self._saved_s = min(MOST_SAVED_S, self._saved_s + given_s)
        self._looked_s, self._worked_s = now_s, worked_s
        return self._saved_s > 0.0

    def get(self, key: Hashable, make: Callable[[Plan | None], Plan]) -> Plan:
        """The plan; `make` gets the one that was in use, if any."""
        made, now = self._made.get(key), self._clock()
        if made is not None:
            age_s = now - made.at_s
            if age_s <= FRESH_S or (age_s <= STALE_S and not self.has_time()):
                return made.plan
        started_s = self._work_clock()
        plan = make(None if made is None else made.plan)
        self._saved_s -= self._work_clock() - started_s
        self._made[key] = _Made(plan, now)
        self._made.move_to_end(key)
        if len(self._made) > MOST_PLANS:
            self._made.popitem(last=False)
        return plan

    def clear(self) -> None:
        self._made.clear()
