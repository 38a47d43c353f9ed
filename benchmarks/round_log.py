"""The rounds that one stream of requests took, as its client saw them: one event is one round's commit."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.client import Answer, stream_completion
from benchmarks.emulated_client import AUTO, EmulatedClient


@dataclass(frozen=True, slots=True)
class Round:
    """`end_s` on the clock of `time.perf_counter`."""

    end_s: float
    ms: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that ended; `begun_after` rounds of the whole log."""

    prompt: str
    begun_after: int
    answer: Answer


@dataclass(slots=True)
class RoundLog:
    """Grows while `ask_on` runs; `grown` is set at each round."""

    rounds: list[Round] = field(default_factory=list)
    requests: list[Asked] = field(default_factory=list)
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask_on(self, client: EmulatedClient, title: str, tokens: int, until: asyncio.Event) -> None:
        """One request after the other, the planner choosing; the one that runs when `until` is set is the last."""
        while not until.is_set():
            prompt, begun_after = f"{title} {len(self.requests)}", len(self.rounds)
            answer, seen = Answer(), 1
            async for answer in stream_completion(client.http, client.body(prompt, tokens, AUTO)):
                if len(answer.arrivals) > seen:
                    seen = len(answer.arrivals)
                    self._take(answer)
            self.requests.append(Asked(prompt, begun_after, answer))
            self.grown.set()

    def _take(self, answer: Answer) -> None:
        (before_s, _), (end_s, num_tokens) = answer.arrivals[-2:]
        self.rounds.append(Round(end_s, (end_s - before_s) * 1e3, num_tokens))
        self.grown.set()

    async def until_rounds(self, count: int) -> None:
        while len(self.rounds) < count:
            self.grown.clear()
            await self.grown.wait()

    async def until_requests(self, begun_after: int, count: int) -> list[Asked]:
        """The first `count` requests that began after so many rounds, when they have ended."""
        while len(found := [r for r in self.requests if r.begun_after >= begun_after]) < count:
            self.grown.clear()
            await self.grown.wait()
        return found[:count]


def ms_per_token(rounds: Sequence[Round]) -> float:
    return sum(r.ms for r in rounds) / sum(r.tokens for r in rounds)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them do not exceed."""
    assert values, "of something"
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def smoothed(rounds: Sequence[Round], width: int) -> list[tuple[float, float]]:
    """(end in seconds, ms per token) over each `width` rounds in a row."""
    return [(rounds[i - 1].end_s, ms_per_token(rounds[i - width : i])) for i in range(width, len(rounds) + 1)]
