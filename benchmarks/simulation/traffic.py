"""Who asks when: streams that ask one request after the other, or arrivals at a rate that may change."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.joined import AUTO, Output
from benchmarks.simulation.cluster import SimulatedCluster
from kvstate.protocol import Sampling, Speculation

DEADLINE_S = 1e6


@dataclass(frozen=True, slots=True)
class Request:
    prompt: Sequence[int]
    tokens: int
    speculation: Speculation = AUTO


MakeRequest = Callable[[int], Request]
"""Of the nth request of all."""


async def streams(cluster: SimulatedCluster, number: int, per_stream: int, make: MakeRequest) -> list[Output]:
    """Of `number` streams, each asking `per_stream` requests; in the order of the requests' numbers."""

    async def stream(first: int) -> list[Output]:
        return [await _ask(cluster, make(first + turn * number)) for turn in range(per_stream)]

    by_stream = await asyncio.gather(*(stream(first) for first in range(number)))
    return [results[turn] for turn in range(per_stream) for results in by_stream]


async def arrivals(
    cluster: SimulatedCluster, rates: Sequence[tuple[float, float]], make: MakeRequest, seed: int
) -> list[Output]:
    """Poisson, at so many per second for so many seconds, one stretch after another; all are answered."""
    rng, asked, loop = random.Random(seed), list[asyncio.Task[Output]](), asyncio.get_running_loop()
    end_s = loop.time()
    for rate, seconds in rates:
        end_s += seconds
        while (wait_s := rng.expovariate(rate)) < end_s - loop.time():
            await asyncio.sleep(wait_s)
            asked.append(asyncio.create_task(_ask(cluster, make(len(asked)))))
        await asyncio.sleep(max(0.0, end_s - loop.time()))
    return list(await asyncio.gather(*asked))


async def _ask(cluster: SimulatedCluster, request: Request) -> Output:
    asked = (request.prompt, Sampling(), request.tokens)
    return await cluster.generate(*asked, speculation=request.speculation, deadline_s=DEADLINE_S)
