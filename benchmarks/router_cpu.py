"""The router's processor time per hop: a step sent to a replica and its reply taken in.

The figure is that of the router's whole process with its streams; everybody else is played in another process
(benchmarks/stub_peers.py). Beside it the same core runs without streams on the same stubs, whose own time is taken out;
its frames are packed and unpacked as in a stream and counted apart. The event loop is uvloop's, as in Ray's workers.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from subprocess import PIPE
from typing import Any

import uvloop

from benchmarks.report import Report
from benchmarks.stopwatch import Stopwatch
from benchmarks.stub_peers import MODELS, StubCoordinator, StubIngress, make_replicas
from cluster.config import parse_config
from cluster.frames import Limits, decode_frame, encode_frames
from deployments.router import Router, settings_of
from kvstate.protocol import Admit, AnyMessage, Members
from router.service import RouterCore
from router.stats import RouterStats

SEQUENCES, REPLICAS = (1, 100, 1000), (3, 16, 64)
START_S, WARM_UP_S, MEASURED_S = 30.0, 3.0, 5.0
AIM_PER_S = 10_000.0
LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one hop, in µs of the processor; `frames_us` is the part of packing and unpacking where that is apart.

    In the mean: `levels` of the chains that ran, `busy` share of one processor, stubs in the same process included.
    """

    cpu_us: float
    frames_us: float
    levels: float
    busy: float


class CoreWithoutStreams:
    """A `RouterCore` and its peers on one event loop. `frames`, `stubs`: processor time that is not the core's."""

    def __init__(self, num_sequences: int, num_replicas: int) -> None:
        self.frames, self.stubs = Stopwatch(), Stopwatch()
        replicas = make_replicas(num_replicas, num_sequences, self.stubs)
        self.core = RouterCore(settings_of(parse_config(_config(num_sequences), "cpu")), self, generation=1)
        self._replicas = {replica.name: replica for replica in replicas}
        self._coordinator, self._ingress = StubCoordinator(replicas), StubIngress(num_sequences)
        self._ingress.send = lambda message: self.core.on_ingress("ingress", message)
        self._outboxes: dict[str, list[AnyMessage]] = {}
        self._inboxes: dict[str, list[AnyMessage]] = {}
        for replica in replicas:
            replica.send = partial(self._queue, self._inboxes, self._to_core, replica.name)

    def start(self) -> None:
        self.core.on_coordinator(Members(tuple(replica.member("") for replica in self._replicas.values())))
        for name in self._replicas:
            self.core.replica_connected(name)
        self._ingress.start()

    def to_replica(self, replica_id: str, message: AnyMessage) -> bool:
        return self._queue(self._outboxes, self._to_stub, replica_id, message)

    def to_coordinator(self, message: AnyMessage) -> bool:
        return self._queue(self._outboxes, self._to_stub, "coordinator", message)

    def to_ingress(self, ingress_id: str, message: AnyMessage) -> bool:
        return self._queue(self._outboxes, self._to_stub, ingress_id, message)

    def _queue(
        self, queues: dict[str, list[AnyMessage]], deliver: Callable[[str], None], name: str, message: AnyMessage
    ) -> bool:
        """One frame per peer and tick, as a stream does it."""
        queue = queues.setdefault(name, [])
        queue.append(message)
        if len(queue) == 1:
            asyncio.get_running_loop().call_soon(deliver, name)
        return True

    def _to_stub(self, name: str) -> None:
        with self.frames:
            frames = encode_frames(1, self._outboxes.pop(name), LIMITS)
        with self.stubs:
            messages = [message for frame in frames for message in decode_frame(frame, LIMITS).messages]
            if name in self._replicas:
                for message in messages:
                    self._replicas[name].take(message)
        if name == "coordinator":
            for message in messages:
                if isinstance(message, Admit):
                    self.core.on_coordinator(self._coordinator.answer(message))
        elif name not in self._replicas:
            for message in messages:
                self._ingress.receive(message)

    def _to_core(self, name: str) -> None:
        with self.stubs:
            frames = encode_frames(0, self._inboxes.pop(name), LIMITS)
        with self.frames:
            messages = [message for frame in frames for message in decode_frame(frame, LIMITS).messages]
        for message in messages:
            self.core.on_replica(message)


class RouterProcess(Router):
    """The router of `deployments/` in this process, without Serve."""

    @property
    def core(self) -> RouterCore:
        return self._core

    async def stop(self) -> None:
        await self._core.close()
        await asyncio.gather(self._coordinator.stop(), *(dialer.stop() for dialer in self._replicas.values()))
        await self._server.stop()


@dataclass(frozen=True, slots=True)
class StubHandle:
    """Stands for the coordinator's Serve handle, of which the router calls `endpoint.remote` only."""

    address: str

    @property
    def endpoint(self) -> "StubHandle":
        return self

    async def remote(self) -> str:
        return self.address


@asynccontextmanager
async def router_and_peers(num_sequences: int, num_replicas: int) -> AsyncIterator[RouterProcess]:
    """A router that serves the requests of its peers' process during the block."""
    command = (sys.executable, "-m", "benchmarks.stub_peers", str(num_sequences), str(num_replicas))
    root = Path(__file__).parents[1]
    peers = await asyncio.create_subprocess_exec(*command, cwd=root, stdin=PIPE, stdout=PIPE)
    assert peers.stdin is not None
    assert peers.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            handle: Any = StubHandle((await peers.stdout.readline()).decode().strip())
        router = RouterProcess.__new__(RouterProcess)
        await RouterProcess.__init__(router, _config(num_sequences), handle)
        peers.stdin.write(f"{await router.endpoint()}\n".encode())
        try:
            yield router
        finally:
            await router.stop()
    finally:
        peers.kill()
        await peers.wait()


async def with_streams(num_sequences: int, num_replicas: int) -> Cost:
    async with router_and_peers(num_sequences, num_replicas) as router:
        return await _cost(router.core.stats, Stopwatch(), Stopwatch())


async def without_streams(num_sequences: int, num_replicas: int) -> Cost:
    both = CoreWithoutStreams(num_sequences, num_replicas)
    both.start()
    try:
        return await _cost(both.core.stats, both.stubs, both.frames)
    finally:
        await both.core.close()


async def _cost(stats: RouterStats, stubs: Stopwatch, frames: Stopwatch) -> Cost:
    def read() -> tuple[float, ...]:
        hops = sum(sum(histogram.counts) for histogram in stats.step_s.values())
        levels = sum(len(chain) * rounds for chain, rounds in stats.chain_rounds.items())
        cpu_s = time.process_time()
        return hops, levels, stats.rounds, cpu_s - stubs.total_s, frames.total_s, cpu_s, time.monotonic()

    async with asyncio.timeout(START_S):
        while stats.rounds == 0:  # noqa: ASYNC110 - the counts are the router's own and tell nobody
            await asyncio.sleep(0.05)
    await asyncio.sleep(WARM_UP_S)
    before = read()
    await asyncio.sleep(MEASURED_S)
    hops, levels, rounds, own_s, frames_s, cpu_s, wall_s = (b - a for a, b in zip(before, read(), strict=True))
    return Cost(own_s * 1e6 / hops, frames_s * 1e6 / hops, levels / rounds, cpu_s / wall_s)


def _config(num_sequences: int) -> dict[str, Any]:
    models = [
        {"name": model.name, "kind": "emulated", "emulate": {"base_ms": model.base_ms, "agreement": model.agreement}}
        for model in MODELS
    ]
    return {"name": "cpu", "models": models, "http": {"max_queue": 2 * num_sequences}, "router": {"remember": False}}


def router_cpu(report: Report) -> None:
    for num_sequences, num_replicas in product(SEQUENCES, REPLICAS):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            whole = runner.run(with_streams(num_sequences, num_replicas))
            core = runner.run(without_streams(num_sequences, num_replicas))
        per_s = 1e6 / whole.cpu_us
        name = f"router: sequences {num_sequences:,}, replicas {num_replicas}: hop, hops"
        figure = f"{whole.cpu_us:.0f} µs, {per_s:,.0f} per CPU s"
        report.add(name, figure, "≥ 10,000 per CPU s", per_s >= AIM_PER_S)
        report.add("  its share of a processor; levels in the mean", f"{whole.busy:.0%}; {whole.levels:.1f}")
        parts = f"{core.cpu_us - core.frames_us:.0f} + {core.frames_us:.1f} µs"
        report.add("  without gRPC: core + frames", parts)
