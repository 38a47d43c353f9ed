"""Which plan a round runs, and what is learned from it: table, planner and probes of one router behind one object.

Plans are made over a snapshot that is at most `max_age_s` old, once for all requests alike, not once per round
(router/plan_cache.py). A request's `speculation` and the app's fixed policy come before the planner.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from msgspec import structs

from kvstate.protocol import Profile, Speculation, Timing, Top
from router.calibration import Trusting
from router.checks import CheckSeen, ProposalsSeen
from router.cooperation import Cooperation, Routed
from router.expertise import with_rates
from router.keys import EVERY, Context, Pair
from router.learned import NOTHING, Learned
from router.own_rates import Missing, OwnRates, shifted
from router.plan import GROUP, Plan, members_of, split_cascade
from router.plan_cache import PlanCache
from router.planner import Found, Planner
from router.probing import ProbeBudget, ProbePlan, choose_probe
from router.replicas import Replicas
from router.sequence import Holder
from router.settings import RouterSettings
from router.snapshot import TableSnapshot
from router.stats import RouterStats
from router.steps import CATCH_UP
from router.table import NO_TOPS, RouterTable

NO_PLAN = Plan((), (), 0.0)
TURNS_WAITED, LEAST_WAIT_MS = 2.0, 2.0
"""Of a turn's expected time, how long drafters that draft together wait for one another, and what comes on top."""

MOST_FOUND = 4096


@dataclass(slots=True)
class RunRecord:
    """What one plan's rounds took: seconds and committed tokens, for measured beside predicted."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0

    @property
    def ms_per_token(self) -> float | None:
        return self.seconds * 1e3 / self.tokens if self.tokens else None


@dataclass(slots=True)
class RequestObserver:
    """The driver's `Observer` of one request, with its own rates; `plan` is that of the present round."""

    planning: "Planning"
    own: OwnRates
    trusting: Trusting
    plan: Plan = NO_PLAN

    def timing(self, holder: Holder, kind: str, timing: Timing, round_trip_s: float) -> None:
        self.planning.timing(holder, kind, timing, round_trip_s, self.plan.keeps_step)

    def drafted(self, model: str, num_asked: int, num_drafted: int) -> None:
        self.planning.drafted(model, num_asked, num_drafted, self.own)

    def checked(self, seen: CheckSeen) -> None:
        self.planning.checked(seen, self.own)

    def proposed(self, seen: ProposalsSeen) -> None:
        for position, token in zip(seen.fused, seen.truth, strict=True):
            for drafter, guesses in position.stated.items():
                self.trusting.observe(drafter, guesses[0][1], guesses[0][0] == token)
        self.planning.proposed(seen, self.own)

    def turn(self, drafters: Sequence[str], seconds: float) -> None:
        self.planning.cooperation.turn(drafters, seconds)

    def trust(self, drafter: str, stated: float) -> float:
        return self.trusting.trust(drafter, stated)

    def beside_trust(self) -> float:
        return self.planning.cooperation.beside.trust

    def turn_deadline_s(self, drafters: Sequence[str]) -> float:
        return (TURNS_WAITED * self.planning.cooperation.turn_ms(drafters) + LEAST_WAIT_MS) / 1e3


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a plan depends on, besides the table."""

    routed: Routed
    missing: Missing
    context: Context


class Planning:
    """One per router; used on its event loop only."""

    def __init__(
        self,
        settings: RouterSettings,
        clock: Callable[[], float],
        stats: RouterStats,
        max_age_s: float = 0.25,
        work_clock: Callable[[], float] = time.thread_time,
        learned: Learned = NOTHING,
    ) -> None:
        self._settings = settings
        self._stats = stats
        self._clock = clock
        self._max_age_s = max_age_s
        self._budget = ProbeBudget()
        self._snapshots: dict[Context, tuple[TableSnapshot, float]] = {}
        self._found: Found = {}
        self._plans = PlanCache(clock, work_clock)
        self.table = RouterTable(learned)
        self.replicas = Replicas()
        self.records: dict[tuple[str, ...], RunRecord] = {}
        self.plans_made = 0
        self.plan_changes = 0
        self.is_overloaded = False
        self.cooperation = Cooperation(self.snapshot, clock, self.replicas, learned.subjects)

    def learned(self) -> Learned:
        """What outlives the process."""
        return structs.replace(self.table.learned(), subjects=self.cooperation.learned())

    def change(self, settings: RouterSettings) -> None:
        """Other settings for the same models, from the next round on."""
        assert settings.models == self._settings.models, "a router serves the models it was made for"
        self._settings = settings
        self._plans.clear()
        self._found.clear()

    def add_model(self, name: str, profile: Profile) -> None:
        if self.table.add_model(name, self._settings.level_of(name), profile):
            self._snapshots.clear()
            self._plans.clear()

    # ----------------------------------------------------------------------------------------------------- observing

    def timing(self, holder: Holder, kind: str, timing: Timing, round_trip_s: float, keeps_step: bool = True) -> None:
        """What a round's steps cost is learned from steps like them: a prefill's rows and queue are not."""
        if kind == "probe":
            self.table.observe_probe_timing(holder.model, holder.replica_id, timing, round_trip_s)
        elif kind != CATCH_UP:
            seen = (holder.model, holder.replica_id, timing, round_trip_s, keeps_step)
            self.replicas.observe(holder.replica_id, timing.busy_s * 1e3, self.table.observe_timing(*seen))
        self._stats.add_step(holder.model, kind, timing)

    def drafted(self, model: str, num_asked: int, num_drafted: int, own: OwnRates) -> None:
        if own.tells_of(model):
            self.table.observe_draft(model, num_asked, num_drafted)
        self._stats.draft_tokens[model] += num_drafted

    def observer(self, own: OwnRates) -> RequestObserver:
        """Of one request."""
        return RequestObserver(self, own, self.cooperation.trusting())

    def proposed(self, seen: ProposalsSeen, own: OwnRates) -> None:
        snapshot = self.snapshot(own.context)
        for drafter, samples in self.cooperation.proposed(seen, snapshot, own).items():
            pair = (drafter, seen.upper)
            self._on_trial(pair, samples, seen.truth, own, snapshot.pairs[pair].acceptance)
            if own.is_telling(pair):
                self.table.observe_probe({drafter: samples, seen.upper: seen.truth}, own.context)

    def _on_trial(
        self, pair: Pair, samples: Sequence[int | None], truth: Sequence[int], own: OwnRates, expected: float
    ) -> None:
        """Each sample at a position whose token is known; no guess is none that is right."""
        prior_positions = self.snapshot(own.context).pairs[pair].prior_positions
        for sample, token in zip(samples, truth, strict=True):
            own.observe(pair, int(sample == token), (expected,), prior_positions)

    def checked(self, seen: CheckSeen, own: OwnRates) -> None:
        if any(len(members_of(name)) > 1 for name in (seen.lower, *(below for _, below in seen.origins))):
            # Of a group as such nothing is kept: there are too many groups.
            self._stats.add_check("cooperating" if GROUP in seen.lower else seen.lower, seen.upper, seen.num_accepted)
            return
        snapshot, pair = self.snapshot(own.context), (seen.lower, seen.upper)
        own.observe(pair, seen.num_accepted, snapshot.expected(seen), snapshot.pairs[pair].prior_positions)
        if own.is_telling(pair):
            self.table.observe_check(seen, own.context)
        self._stats.add_check(*pair, seen.num_accepted)

    def probed(
        self,
        samples: Mapping[str, Sequence[int | None]],
        committed: Sequence[int],
        own: OwnRates,
        tops: Mapping[str, Sequence[Top]] = NO_TOPS,
    ) -> None:
        """`samples` of each model at the positions of the `committed` tokens; `tops` there, the target's among them."""
        snapshot, target = self.snapshot(own.context), self._settings.target
        for model, sampled in samples.items():
            [expected] = snapshot.draft_goes_on(model, target, 1)
            self._on_trial((model, target), sampled, committed, own, expected)
        if samples:
            self.table.observe_probe({**samples, target: committed}, own.context, tops)

    def record_round(self, plan: Plan, seconds: float, num_tokens: int, speculation: Speculation) -> None:
        record = self.records.setdefault(plan.kind, RunRecord())
        record.seconds += seconds
        record.tokens += num_tokens
        record.rounds += 1
        if self._is_planned(speculation):
            self._budget.rounds_s += seconds

    def record_probe(self, busy_s: float) -> None:
        """What the probed models computed for it."""
        self._budget.probes_s += busy_s

    def record_request(self, own: OwnRates) -> None:
        """It ended: what it saw tells how unlike one another requests are."""
        for pair, num_positions, num_accepted in own.totals():
            self.table.observe_request(pair, num_positions, num_accepted, own.context)
        snapshot = self.snapshot(own.context)
        models = [name for name in self._settings.models if name in snapshot.models]
        if models:
            self.cooperation.ended(own, snapshot, models)
        self.cooperation.forget(own)

    # ------------------------------------------------------------------------------------------------------ choosing

    def plan(
        self,
        holders: Sequence[str],
        speculation: Speculation,
        own: OwnRates,
        missing: Missing = (),
        present: Plan = NO_PLAN,
    ) -> Plan:
        """The plan of the next round over models that hold the sequence (any order; the target is one).

        `own`: how the request differs from what the table says of its context; `missing`: what models that it could use
        would have to compute before; `present`: that of its last round.
        """
        models = tuple(name for name in self._settings.models if name in holders)
        if speculation.mode == "off":
            return Plan((models[-1],), (), 0.0)
        if (fixed := self._fixed_by(speculation)) is not None:
            return self._fixed(models, *fixed)
        return self._adaptive(models, own, missing, present)

    def _fixed_by(self, speculation: Speculation) -> tuple[Sequence[str], Sequence[int]] | None:
        """Chain and windows, where they are not planned."""
        if speculation.mode == "fixed":
            return speculation.chain, speculation.windows
        return (self._settings.chain, self._settings.windows) if self._settings.policy == "fixed" else None

    def held(self, speculation: Speculation, own: OwnRates) -> tuple[str, ...]:
        """By which models a new request should be held: those that its plans may name."""
        if speculation.mode == "off":
            return (self._settings.target,)
        if (fixed := self._fixed_by(speculation)) is not None:
            first, tail = split_cascade(fixed[0][0])
            named = {*members_of(first), tail, *fixed[0][1:], self._settings.target}
            return tuple(name for name in self._settings.models if name in named)
        snapshot = self.snapshot(own.context)
        models = [name for name in self._settings.models if name in snapshot.models]
        if self._settings.target not in models:
            return self._settings.models
        return self.cooperation.held(models, snapshot, own, self._settings.cooperate)

    def choose_probe(
        self, holders: Sequence[str], plan: Plan, output_len: int, speculation: Speculation, own: OwnRates
    ) -> ProbePlan | None:
        """The probe that goes beside this round, if any; counted. None where the planner's choice is not asked for."""
        if not self._is_planned(speculation):
            return None
        models = [name for name in self._settings.models if name in holders]
        probe = choose_probe(
            self._budget,
            self.snapshot(own.context),
            models,
            plan.pairs,
            output_len,
            self._settings.explore,
            own,
            self.snapshot(),
        )
        self._budget.record(probe)
        if probe is not None:
            own.probed_len.update(dict.fromkeys(probe.models, output_len))
        return probe

    def _is_planned(self, speculation: Speculation) -> bool:
        return speculation.mode == "auto" and self._settings.policy != "fixed"

    @property
    def explore_share(self) -> float:
        return self._budget.probes / max(1, self._budget.rounds)

    def snapshot(self, context: Context = EVERY) -> TableSnapshot:
        """The table as it is for a context, at most `max_age_s` old."""
        now = self._clock()
        snapshot, made_s = self._snapshots.get(context, (None, 0.0))
        if snapshot is None or now - made_s > self._max_age_s:
            snapshot = self.table.snapshot(context)
            self._snapshots[context] = (snapshot, now)
        return snapshot

    def overview(self) -> tuple[Plan, list[Plan]]:
        """The plan of a request without a wish of its own, and every chain of the models known so far, of drafters that
        draft together too, with its best windows, fastest first; none while there is no target.
        """
        own, models = OwnRates(), tuple(name for name in self._settings.models if name in self.snapshot().models)
        if self._settings.target not in models:
            return NO_PLAN, []
        plan = self.plan(models, Speculation(), own)
        routed = self.cooperation.route(models, self.snapshot(), own, (), self._settings.cooperate)
        self.cooperation.forget(own)
        return plan, self._planner(Wanted(routed, (), own.context)).candidates((*routed.groups, *models))

    def _adaptive(self, models: tuple[str, ...], own: OwnRates, missing: Missing, present: Plan) -> Plan:
        """Where there is no time to plan, a request that has its own drafters goes on with its plan, the first being
        made in any case; others go by the plan of their context.
        """
        snapshot, most = self.snapshot(own.context), self._settings.cooperate
        routed = self.cooperation.route(models, snapshot, own, present.drafters, most)
        wanted = Wanted(routed, tuple(m for m in missing if m[0] in routed.models), own.context)
        if wanted not in self._plans and not self._plans.has_time() and (present.chain or not routed.rates):
            if routed.rates and {*present.drafters, present.chain[-1]} <= set(routed.models):
                return present
            lacking = {name for name, _ in missing if name != models[-1]}
            wanted = Wanted(routed.without(lacking), (), own.context)
        return self._plans.get(wanted, partial(self._make, wanted))

    def _make(self, wanted: Wanted, present: Plan | None) -> Plan:
        self.plans_made += 1
        planner = self._planner(wanted)
        best = planner.choose((*wanted.routed.groups, *wanted.routed.alone), present, self._slo_ms_per_token)
        chosen = self._finished(planner, best)
        self.plan_changes += present is not None and present.label != chosen.label
        return chosen

    def _planner(self, wanted: Wanted) -> Planner:
        routed = wanted.routed
        seen = with_rates(shifted(self.snapshot(wanted.context), routed.shifts, wanted.missing), routed.rates)
        for group in routed.groups:
            seen = self.cooperation.with_group(seen, group, routed.models)
        if len(self._found) > MOST_FOUND:
            self._found.clear()
        return Planner(seen, self._settings.max_window, self._found, self._settings.draft_ahead)

    @property
    def _slo_ms_per_token(self) -> float | None:
        """Where requests wait for room, any time is good enough that lets more of them in."""
        if self._settings.slo_ms_per_token is None and self.is_overloaded:
            return math.inf
        return self._settings.slo_ms_per_token

    def _finished(self, planner: Planner, plan: Plan) -> Plan:
        """With what depends on the choice."""
        return replace(planner.with_stop(plan), tree_nodes=self._settings.tree_nodes if len(plan.chain) == 2 else 0)

    def _fixed(self, models: Sequence[str], chain: Sequence[str], windows: Sequence[int]) -> Plan:
        """The wished chain without the levels that hold nothing; a level's window goes with it. Windows that were not
        wished are planned, as those of tails always are.
        """
        first, tail = split_cascade(chain[0])
        group = [name for name in members_of(first) if name in models]
        first, tail = (GROUP.join(group), tail) if group else (tail or first, None)
        chain = (first, *chain[1:])
        kept = [i for i, name in enumerate(chain) if name in models or (i == 0 and group)]
        names = tuple(chain[i] for i in kept)
        given = tuple(windows[i] for i in kept[:-1]) if windows else ()
        tail = tail if tail in models and len(names) > 1 else None
        if given and tail is None:
            return Plan(names, given, 0.0, keeps_step=len(names) <= 2)

        def make(_: Plan | None) -> Plan:
            seen = self.snapshot()
            if len(group) > 1:
                seen = self.cooperation.with_group(seen, first, models)
            planner = Planner(seen, self._settings.max_window, draft_ahead=self._settings.draft_ahead)
            best = planner.best_tail(names, given, tail) if given and tail else planner.best(names, tail)
            return self._finished(planner, best)

        return self._plans.get(("fixed", names, given, tail), make)
