"""What is learned of drafters that stand on one level: whom a request goes to, what several together are worth.

One per router. The parts are pure and know nothing of one another: router/subjects.py, router/expertise.py,
router/fusion.py, router/calibration.py.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from router.acceptance import log_odds, shift_rate
from router.assignment import Capacity, Given
from router.calibration import Calibration, Trusting
from router.checks import ProposalsSeen
from router.expertise import Entry, Rates, alternatives, groups_of, routing_vector, with_group
from router.fusion import FusionGain
from router.latency import Ewma
from router.learned import SubjectsLearned
from router.own_rates import OwnRates, Shifts
from router.plan import members_of
from router.replicas import Replicas
from router.snapshot import TableSnapshot
from router.subjects import Evidence, Subjects, Suits
from router.trees import BesideRates

STEP = 0.5
"""In log-odds, to which what a drafter is expected to be in a request is rounded, so that requests share plans."""

MOST_TURN_RATIO = 4.0
LEAST_HELD, HELD_PER_DRAFTER = 8, 2
"""Of a level's drafters, how many hold a request: at least so many, and so many for each that may draft for it at once.
The others would compute and keep for nothing what hardly ever serves.
"""

MOST_ALONE = 2
"""Of the drafters chosen for a request, how many it is planned for that one drafts by itself."""

ASSUMED_WINDOW = 6.0
"""Tokens of a draft, where it is weighed what a drafter is worth."""


@dataclass(frozen=True, slots=True)
class Routed:
    """`models` that a request's plan may name, cheapest first, of these `alone` not only in `groups`, which it may name
    too; `rates` of the drafters chosen among alternatives, and `shifts` of other pairs.
    """

    models: tuple[str, ...]
    alone: tuple[str, ...]
    groups: tuple[str, ...] = ()
    rates: Rates = ()
    shifts: Shifts = ()

    def without(self, names: Set[str]) -> "Routed":
        """Where there is no time for plans of this request's own: without these models and its shifts."""
        return Routed(
            tuple(name for name in self.models if name not in names),
            tuple(name for name in self.alone if name not in names),
            tuple(group for group in self.groups if not names & set(members_of(group))),
            self.rates,
        )


class Cooperation:
    """`table`: the table as it is for all requests, now."""

    def __init__(
        self,
        table: Callable[[], TableSnapshot],
        clock: Callable[[], float],
        replicas: Replicas,
        learned: Mapping[int, SubjectsLearned],
    ) -> None:
        self._table = table
        self._replicas = replicas
        self._given: defaultdict[int, Given] = defaultdict(lambda: Given(clock))
        self._calibrations: dict[str, Calibration] = {}
        self._subjects: defaultdict[int, Subjects] = defaultdict(Subjects)
        self._subjects.update({level: Subjects.restored(subjects) for level, subjects in learned.items()})
        self._turn_ratios: dict[int, Ewma] = {}
        self.gain = FusionGain()
        self.beside = BesideRates()

    def learned(self) -> dict[int, SubjectsLearned]:
        """What outlives the process, by level."""
        return {level: subjects.learned for level, subjects in self._subjects.items() if len(subjects)}

    def trusting(self) -> Trusting:
        """Of one request."""
        return Trusting(self._calibrations)

    def route(
        self, models: Sequence[str], snapshot: TableSnapshot, own: OwnRates, in_use: Sequence[str], most: int
    ) -> Routed:
        """Of each level with several models the `most` promising ones for the request; groups of those of the first
        such level.
        """
        routed = Routed(tuple(models), tuple(models), shifts=own.shifts)
        for names in alternatives(models, snapshot.models):
            suits = self._suits(names, models[-1], snapshot, own)
            chosen = self._chosen(names, models[-1], snapshot, own, routing_vector(suits, in_use), most)
            kept = tuple(name for name in routed.models if name in chosen or name not in names)
            alone = tuple(name for name in routed.alone if name in chosen[:MOST_ALONE] or name not in names)
            shifts = tuple(shift for shift in routed.shifts if set(shift[0]) <= set(kept) and shift[0][0] not in names)
            rates = (*routed.rates, *(((name, models[-1]), _rounded(suits[name])) for name in sorted(chosen)))
            routed = Routed(kept, alone, routed.groups or tuple(groups_of(chosen, models)), rates, shifts)
        return routed

    def _chosen(
        self,
        names: Sequence[str],
        target: str,
        snapshot: TableSnapshot,
        own: OwnRates,
        vector: Sequence[Entry],
        most: int,
    ) -> list[str]:
        """The request's best, or where drafters are scarce, what it got when all requests were last given theirs."""
        level = snapshot.models[names[0]].level
        given, capacity = self._given[level], self._capacity(level, target, snapshot)
        if not capacity.is_scarce():
            return [entry.drafter for entry in vector[:most]]
        return given.get(own, {entry.drafter: entry.hoped for entry in vector}, capacity, most)

    def _capacity(self, level: int, target: str, snapshot: TableSnapshot) -> Capacity:
        """Of all the level's drafters, whoever holds a request."""
        costs = {name: cost for name, cost in snapshot.models.items() if cost.level == level}
        return Capacity(costs, ASSUMED_WINDOW, snapshot.models[target].call_ms(1.0), self._replicas.numbers)

    def held(self, models: Sequence[str], snapshot: TableSnapshot, own: OwnRates, most: int) -> tuple[str, ...]:
        """By which of `models` a new request should be held: of each level with many those that promise most, less what
        their places cost where many requests are with them already.
        """
        number = max(LEAST_HELD, HELD_PER_DRAFTER * most)
        left_out: set[str] = set()
        for names in alternatives(models, snapshot.models):
            if len(names) <= number:
                continue
            vector = routing_vector(self._suits(names, models[-1], snapshot, own))
            capacity = self._capacity(snapshot.models[names[0]].level, models[-1], snapshot)
            held = self._replicas.held
            worth = {
                entry.drafter: capacity.worth(entry.hoped)
                - capacity.place_cost(entry.drafter, held[entry.drafter] * most // number + 1)
                for entry in vector
            }
            left_out.update(sorted(names, key=lambda name: (-worth[name], held[name]))[number:])
        return tuple(name for name in models if name not in left_out)

    def proposed(self, seen: ProposalsSeen, snapshot: TableSnapshot, own: OwnRates) -> dict[str, list[int | None]]:
        """What each of several drafters proposed at the positions; each was on trial there, and so was the fused token.

        Empty where it was one drafter's own draft, of which the check tells.
        """
        for position, truth in zip(seen.fused, seen.truth, strict=True):
            self.beside.observe(position, truth)
        drafters = sorted({name for position in seen.fused for name in position.stated})
        if len(drafters) < 2:
            return {}
        suits = self._suits(drafters, seen.upper, snapshot, own)
        num_right = sum(position.token == truth for position, truth in zip(seen.fused, seen.truth, strict=True))
        self.gain.observe([suits[name].acceptance for name in drafters], num_right, len(seen.truth))
        stated = [position.stated for position in seen.fused]
        return {name: [of[name][0][0] if name in of else None for of in stated] for name in drafters}

    def ended(self, own: OwnRates, snapshot: TableSnapshot, models: Sequence[str]) -> None:
        """A request."""
        for names in alternatives(models, snapshot.models):
            base, evidence = _evidence(names, models[-1], snapshot, own)
            self._subjects[snapshot.models[names[0]].level].learn(base, evidence, own.words)

    def forget(self, own: OwnRates) -> None:
        """A request that is no more."""
        for given in self._given.values():
            given.forget(own)

    def turn(self, drafters: Sequence[str], seconds: float) -> None:
        """What one position took that these drafted together."""
        expected_ms = self._expected_turn_ms(drafters)
        if expected_ms > 0.0 and len(drafters) > 1:
            ratio = self._turn_ratios.setdefault(len(drafters), Ewma(value=1.0))
            ratio.add(min(MOST_TURN_RATIO, seconds * 1e3 / expected_ms))

    def turn_ms(self, drafters: Sequence[str]) -> float:
        """The more take part, the longer the last one may take: by what turns of as many took, else of fewer."""
        known = max((size for size in self._turn_ratios if size <= len(drafters)), default=None)
        ratio = 1.0 if known is None else self._turn_ratios[known].value
        return ratio * self._expected_turn_ms(drafters)

    def with_group(self, seen: TableSnapshot, group: str, models: Sequence[str]) -> TableSnapshot:
        """A table in which the group stands as a model."""
        members = members_of(group)
        uppers = [name for name in models if seen.models[name].level > seen.models[members[0]].level]
        acceptances = {
            upper: self.gain.acceptance([seen.acceptance(name, upper) for name in members]) for upper in uppers
        }
        return with_group(seen, group, self.turn_ms(members), acceptances)

    def _suits(self, names: Sequence[str], upper: str, snapshot: TableSnapshot, own: OwnRates) -> dict[str, Suits]:
        base, evidence = _evidence(names, upper, snapshot, own)
        return self._subjects[snapshot.models[names[0]].level].suits(base, evidence, own.words)

    def _expected_turn_ms(self, drafters: Sequence[str]) -> float:
        models = self._table().models
        return max(models[name].call_ms(1.0) for name in drafters)


def _evidence(
    names: Sequence[str], upper: str, snapshot: TableSnapshot, own: OwnRates
) -> tuple[dict[str, float], Evidence]:
    base = {name: snapshot.acceptance(name, upper) for name in names}
    return base, {name: own.lately((name, upper)) for name in names}


def _rounded(suits: Suits) -> float:
    return shift_rate(0.5, STEP * round(log_odds(suits.acceptance) / STEP))
