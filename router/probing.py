"""When to probe and whom: estimates for models and pairs that the running chains do not compare. Pure.

A probe lets models sample at the last committed positions (at most 64), in one forward each; the target's samples there
are the committed tokens themselves, so the target is never probed. All models that stand in a pair hardly known, or
otherwise in one that the chain does not compare, are probed at once: then each position tells of all their pairs.
Probes take at most the share `explore` of all rounds and
of all rounds' time: all of it while some pair has been examined at few positions, or where requests differ and it is
not known yet how well a drafter suits this one; half of it else (a model that drifted must be noticed). One probe is
allowed before the share has room for it, so that a pair unknown at the start is not unknown for 20 rounds; a probe that
took long (a model that had not read the prompt) is paid off before the next.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from router.keys import Pair
from router.own_rates import OwnRates
from router.snapshot import ALL_ALIKE, PairEstimate, TableSnapshot

MOST_POSITIONS = 64
FEW_SAMPLES, ENOUGH_SAMPLES = 64, 400
"""Of a pair in one context, and over all: at fewer examined positions it is hardly known."""

FEWEST_POSITIONS, LEAST_POSITIONS = 8, 16
"""That a probe must add to those already examined: for pairs hardly known in their context, and for others."""

MOST_ROUNDS = 200.0


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """`models` sample at the last `count` committed positions; `stop_below` as in a plan that drafts one token."""

    models: tuple[str, ...]
    count: int
    stop_below: float = 0.0


@dataclass(slots=True)
class ProbeBudget:
    """What was spent lately, over all requests; `last_probed` gives the turn of each model's last probe."""

    rounds: float = 0.0
    probes: float = 0.0
    rounds_s: float = 0.0
    probes_s: float = 0.0
    turn: int = 0
    last_probed: dict[str, int] = field(default_factory=dict)

    def record(self, probed: ProbePlan | None) -> None:
        """Count one round, and the probe it carried, if any. Old rounds fade: what they left over is no credit."""
        self.rounds += 1.0
        self.turn += 1
        if probed is not None:
            self.probes += 1.0
            self.last_probed.update((name, self.turn) for name in probed.models)
        if self.rounds >= MOST_ROUNDS:
            self.rounds, self.probes = self.rounds / 2.0, self.probes / 2.0
            self.rounds_s, self.probes_s = self.rounds_s / 2.0, self.probes_s / 2.0


def choose_probe(
    budget: ProbeBudget,
    snapshot: TableSnapshot,
    models: Sequence[str],
    compared: Collection[Pair],
    num_committed_outputs: int,
    explore: float,
    own: OwnRates,
    over_all: TableSnapshot | None = None,
) -> ProbePlan | None:
    """The probe that this round should carry, or None.

    `models` are those that hold the sequence, cheapest first, target last; `compared`: pairs that the round compares;
    `num_committed_outputs` counts its output so far (prompt positions are no fair sample of what is generated), `own`
    what was examined of it. `over_all`: the table over all contexts, where `snapshot` is of one.
    """
    if not _has_room(budget, explore):  # in nearly every round
        return None
    pairs = [pair for pair in snapshot.pairs if pair not in compared and set(pair) <= set(models)]
    if explore <= 0.0 or not pairs or num_committed_outputs < 1:
        return None
    unknown = [pair for pair in pairs if snapshot.pairs[pair].samples < FEW_SAMPLES]
    vague = [pair for pair in pairs if (over_all or snapshot).pairs[pair].samples < ENOUGH_SAMPLES]
    with_target = [(name, models[-1]) for name in models[:-1] if (name, models[-1]) in pairs]
    strange = [pair for pair in with_target if own.positions(pair) < _wanted_positions(snapshot.pairs[pair])]
    share = explore if unknown or vague or strange else explore / 2.0
    wanted = unknown or vague or (_of_one_level(strange, budget, snapshot) if strange else pairs)
    probed = tuple(name for name in models[:-1] if any(name in pair for pair in wanted))
    count = min(num_committed_outputs - max(own.probed_len.get(name, 0) for name in probed), MOST_POSITIONS)
    least = FEWEST_POSITIONS if unknown else LEAST_POSITIONS
    if count < least or not _has_room(budget, share):
        return None
    return ProbePlan(probed, count, snapshot.models[models[-1]].row_share)


def _has_room(budget: ProbeBudget, share: float) -> bool:
    """Whether one more probe keeps within the share of rounds and of time."""
    if budget.probes == 0:
        return True
    return budget.probes + 1 <= share * (budget.rounds + 1) and budget.probes_s <= share * budget.rounds_s


def _wanted_positions(pair: PairEstimate) -> float:
    """None where requests are all alike."""
    return pair.prior_positions if pair.prior_positions < ALL_ALIKE else 0.0


def _of_one_level(pairs: Sequence[Pair], budget: ProbeBudget, snapshot: TableSnapshot) -> list[Pair]:
    """Pairs with the target: those of the drafter that was not probed for longest, and of its alternatives."""
    level = {name: snapshot.models[name].level for name, _ in pairs}
    longest_ago = min(level, key=lambda name: budget.last_probed.get(name, 0))
    return [pair for pair in pairs if level[pair[0]] == level[longest_ago]]
