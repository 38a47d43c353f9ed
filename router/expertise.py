"""Which drafters a request goes to, where a level has several: a routing vector per request over them. Pure.

An entry is how often the drafter's tokens would be accepted in this request, by what it has shown so far and by what
is known of requests like it (router/subjects.py). Where that is uncertain, uncertainty counts for a drafter: while
those in use do well, nothing unknown looks better than they do; while they do badly, those hardly tried do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from router.keys import Pair
from router.plan import GROUP
from router.snapshot import ModelCost, PairEstimate, TableSnapshot
from router.subjects import Suits

CURIOSITY = 0.6
"""Standard deviations by which an uncertain drafter is taken to be better than it seems."""

LOYALTY = 0.02
"""By how much of its tokens another drafter must seem better than one in use: it has to compute the text first."""

GROUP_SIZES = (2, 3, 4, 6, 8, 12)
"""Besides the largest: each is a candidate of every plan, and one drafter more among many changes little."""

Rates = tuple[tuple[Pair, float], ...]
"""Acceptance by pair."""


@dataclass(frozen=True, slots=True)
class Entry:
    """`acceptance` as expected; `hoped`: what it may well be."""

    drafter: str
    acceptance: float
    hoped: float


def routing_vector(suits: Mapping[str, Suits], in_use: Sequence[str] = ()) -> list[Entry]:
    """Most promising first; ties by the order given."""
    entries = [
        Entry(name, s.acceptance, s.acceptance + CURIOSITY * s.deviation + LOYALTY * (name in in_use))
        for name, s in suits.items()
    ]
    return sorted(entries, key=lambda entry: -entry.hoped)


def alternatives(models: Sequence[str], costs: Mapping[str, ModelCost]) -> list[list[str]]:
    """The models of each level that has several; `models` cheapest first, the target last, which has no alternative."""
    levels = [list(names) for _, names in groupby(models[:-1], key=lambda name: costs[name].level)]
    return [names for names in levels if len(names) > 1]


def groups_of(chosen: Sequence[str], models: Sequence[str]) -> list[str]:
    """Groups of the first two, three, … and of all of `chosen`; names within a group stand in the order of `models`."""
    sizes = sorted({size for size in (*GROUP_SIZES, len(chosen)) if 2 <= size <= len(chosen)})
    return [GROUP.join(sorted(chosen[:size], key=models.index)) for size in sizes]


def with_rates(snapshot: TableSnapshot, rates: Rates) -> TableSnapshot:
    """The table with other acceptances, the same at all positions of a draft.

    That later positions are accepted more often, as the table has it, is because experts' drafts get there.
    """
    pairs = dict(snapshot.pairs)
    for pair, acceptance in rates:
        pairs[pair] = replace(pairs[pair], acceptance=acceptance, goes_on=())
    return replace(snapshot, pairs=pairs)


def with_group(snapshot: TableSnapshot, group: str, turn_ms: float, acceptances: Mapping[str, float]) -> TableSnapshot:
    """The table with a group as if it were a model of its members' level: each token takes it a turn of `turn_ms`;
    `acceptances` by checker.
    """
    first = snapshot.models[group.split(GROUP, maxsplit=1)[0]]
    cost = ModelCost(group, first.level, turn_ms, per_token_ms=first.per_token_ms, samples=first.samples)
    pairs = {(group, upper): PairEstimate(group, upper, rate, 1.0 - rate, 0) for upper, rate in acceptances.items()}
    return replace(snapshot, models={**snapshot.models, group: cost}, pairs={**snapshot.pairs, **pairs})
