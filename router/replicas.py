"""Which replica of a model a new request should get: the one where its steps will take the least time. Pure.

A step takes what the model's batch takes with one sequence more, times how slow that replica was seen to be, and waits
for batches under way the likelier the more sequences are there. What of the prompt's beginning is cached on a replica
need not be computed again, spread over the tokens of an answer. The coordinator, which knows the room, has the last
word.
"""

import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from router.latency import Ewma
from router.snapshot import ModelCost

PREFIX_TOKENS = 64
MOST_PREFIXES_OF_A_PROMPT = 32
MOST_PREFIXES = 8192
ANSWER_TOKENS = 64
"""Over how many tokens of an answer a cached prefix is spread."""

MOST_COMPARED, MOST_PREFERRED = 64, 8
"""Of a model's replicas, how many are compared for a request, where there are more some at random, and how many named:
it costs the router as much with ten thousand of them, and the best of 64 is as good as the best for practical ends.
"""

MOST_SLOWNESS = 10.0


@dataclass(slots=True)
class Replicas:
    """`serving`: by model, who is there. `open`: sequences by replica, `held` by model. `slowness`: a replica's batches
    took so much of what its model's do.
    """

    serving: dict[str, list[str]] = field(default_factory=dict)
    open: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)
    _rng: random.Random = field(default_factory=lambda: random.Random(0))
    _slowness: dict[str, Ewma] = field(default_factory=dict)
    _prefixes: OrderedDict[tuple[str, int], str] = field(default_factory=OrderedDict)

    def observe(self, replica_id: str, busy_ms: float, expected_ms: float) -> None:
        """A step's batches, and what the model's take by the table."""
        if expected_ms > 0.0:
            ratio = min(MOST_SLOWNESS, max(1.0 / MOST_SLOWNESS, busy_ms / expected_ms))
            self._slowness.setdefault(replica_id, Ewma()).add(ratio)

    def slowness(self, replica_id: str) -> float:
        seen = self._slowness.get(replica_id)
        return 1.0 if seen is None else seen.value

    def opened(self, holders: Mapping[str, str], prompt: Sequence[int]) -> None:
        """A sequence is held by these replicas, by model: they will have cached its prompt."""
        self.open.update(holders.values())
        self.held.update(list(holders))
        for prefix in _prefixes(prompt):
            for model, replica_id in holders.items():
                self._prefixes[model, prefix] = replica_id
                self._prefixes.move_to_end((model, prefix))
        while len(self._prefixes) > MOST_PREFIXES:
            self._prefixes.popitem(last=False)

    def closed(self, holders: Mapping[str, str]) -> None:
        for counter, names in ((self.open, list(holders.values())), (self.held, list(holders))):
            counter.subtract(names)
            for name in names:
                if not counter[name]:
                    del counter[name]

    def joined(self, model: str, replica_id: str) -> None:
        """It is there."""
        self.serving.setdefault(model, []).append(replica_id)

    def lost(self, model: str, replica_id: str) -> None:
        """One that was there."""
        self.serving[model].remove(replica_id)
        self._slowness.pop(replica_id, None)
        self._prefixes = OrderedDict((key, held) for key, held in self._prefixes.items() if held != replica_id)

    @property
    def numbers(self) -> dict[str, int]:
        """By model."""
        return {model: max(1, len(ids)) for model, ids in self.serving.items()}

    def preferred(
        self, models: Sequence[str], costs: Mapping[str, ModelCost], prompt: Sequence[int]
    ) -> dict[str, tuple[str, ...]]:
        """Per model with several replicas, the ids of the best ones, the best first."""
        serving = {model: self.serving.get(model, ()) for model in models if model in costs}
        several = {model: ids for model, ids in serving.items() if len(ids) > 1}
        prefixes = list(_prefixes(prompt)) if several else []
        return {model: self._ordered(costs[model], ids, prefixes) for model, ids in several.items()}

    def _ordered(self, cost: ModelCost, ids: Sequence[str], prefixes: Sequence[int]) -> tuple[str, ...]:
        cached: Counter[str] = Counter()
        for number, prefix in enumerate(prefixes, 1):
            holder = self._prefixes.get((cost.name, prefix))
            if holder is not None:
                cached[holder] = number * PREFIX_TOKENS

        def step_ms(replica_id: str) -> float:
            load = self.open[replica_id]
            wait = load / (load + 2.0) * cost.base_ms
            batch_ms = cost.base_ms + (cost.per_token_ms + cost.per_sequence_ms) * (load + 1.0)
            saved_ms = cached[replica_id] * cost.per_token_ms / ANSWER_TOKENS
            return self.slowness(replica_id) * (wait + batch_ms) - saved_ms

        if len(ids) > MOST_COMPARED:
            there = set(ids) if cached else ()
            ids = [*self._rng.sample(ids, MOST_COMPARED), *(held for held in cached if held in there)]
        return tuple(heapq.nsmallest(MOST_PREFERRED, dict.fromkeys(ids), key=step_ms))


def _prefixes(prompt: Sequence[int]) -> Iterator[int]:
    """A number for each whole stretch of the prompt's beginning."""
    number = 0
    for end in range(PREFIX_TOKENS, min(len(prompt), PREFIX_TOKENS * MOST_PREFIXES_OF_A_PROMPT) + 1, PREFIX_TOKENS):
        number = hash((number, *prompt[end - PREFIX_TOKENS : end]))
        yield number
