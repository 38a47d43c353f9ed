"""Router, coordinator and engines of one app in one process: the same cores and messages, without Ray and sockets.

For tests and benchmarks of what the cores do. Each engine has its own thread; everything else runs on one event loop.
`lose` is a fault to inject: a message for which it returns True never arrives.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvstate.coordinator import CoordinatorCore, Outgoing
from kvstate.protocol import (
    CancelRequest,
    Delivered,
    Failed,
    FinishReason,
    Logprobs,
    Message,
    OpenRequest,
    Register,
    ReplicaInfo,
    Sampling,
    SpecMetrics,
    Speculation,
)
from models.backend import Backend
from models.engine import Engine
from router.service import RouterCore
from router.settings import RouterSettings

TICK_S = 0.05
STOP_S = 30.0
AUTO = Speculation()
Lose = Callable[[str, Message], bool]


class RequestFailed(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, message


@dataclass(slots=True)
class Output:
    """`arrived_s[i]`: when the i-th part came; `parts[i]`: its number of tokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    metrics: SpecMetrics | None = None

    @property
    def ms_per_token(self) -> float:
        """(last − first) / (n − 1)."""
        return (self.arrived_s[-1] - self.arrived_s[0]) * 1e3 / max(1, len(self.tokens) - self.parts[0])


class InProcessCluster:
    """`backends`: model name → backend, cheapest first, target last. Use `running`."""

    def __init__(self, backends: Mapping[str, Backend], settings: RouterSettings, lose: Lose) -> None:
        self._loop = asyncio.get_running_loop()
        self._lose = lose
        self._inboxes: dict[str, asyncio.Queue[Delivered | Failed]] = {}
        self._ids = itertools.count()
        self.backends = backends
        self.coordinator = CoordinatorCore(tuple(backends))
        self.router = RouterCore(settings, self, generation=1)
        self.engines = {name: Engine(backend, self._deliver_of(name)) for name, backend in backends.items()}
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._route(self.coordinator.router_connected("router", time.monotonic()))
        for name in self.engines:
            self.add_replica(name)

    def add_replica(self, name: str) -> None:
        """Profile, start and register the engine of `name`; a lost one comes back with nothing."""
        engine, backend = self.engines[name], self.backends[name]
        info = ReplicaInfo(
            name,
            name,
            "here",
            "in process",
            backend.vocabulary,
            backend.context_len,
            backend.block_tokens,
            backend.num_blocks,
            engine.profile(),
        )
        self._threads.append(threading.Thread(target=engine.run, name=name, daemon=True))
        self._threads[-1].start()
        self._route(self.coordinator.on_replica(name, Register(info, ()), time.monotonic()))
        self.router.replica_connected(name)

    def lose_replica(self, name: str) -> None:
        """As if its process died."""
        self.engines.pop(name).stop()
        self.router.replica_lost(name)
        self._route(self.coordinator.replica_lost(name, time.monotonic()))

    async def stop(self) -> None:
        await self.router.close()
        for engine in self.engines.values():
            engine.stop()
        for thread in self._threads:  # a forward still running delivers to this loop: it must not close before
            await asyncio.to_thread(thread.join, STOP_S)
            assert not thread.is_alive(), f"the engine of {thread.name} did not stop within {STOP_S} s"

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        stop_ids: Sequence[int] = (),
        speculation: Speculation = AUTO,
        deadline_s: float = 120.0,
        logprobs: int = -1,
    ) -> Output:
        """One request to its end. Raises RequestFailed."""
        output = Output()
        async for part in self.stream(prompt, sampling, max_tokens, stop_ids, speculation, deadline_s, logprobs):
            output.tokens.extend(part.tokens)
            output.logprobs.extend(part.logprobs)
            output.parts.append(len(part.tokens))
            output.arrived_s.append(time.monotonic())
            output.finish_reason, output.metrics = part.finish_reason, part.metrics
        return output

    async def stream(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        stop_ids: Sequence[int],
        speculation: Speculation,
        deadline_s: float = 120.0,
        logprobs: int = -1,
    ) -> AsyncIterator[Delivered]:
        request_id = str(next(self._ids))
        inbox = self._inboxes[request_id] = asyncio.Queue()
        request = OpenRequest(
            request_id, tuple(prompt), sampling, max_tokens, tuple(stop_ids), deadline_s, (), speculation, logprobs
        )
        self.router.on_ingress("test", request)
        try:
            while True:
                part = await asyncio.wait_for(inbox.get(), deadline_s + 5.0)
                if isinstance(part, Failed):
                    raise RequestFailed(part.code, part.message)
                yield part
                if part.finish_reason is not None:
                    return
        finally:
            del self._inboxes[request_id]
            self.router.on_ingress("test", CancelRequest(request_id))

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for name, engine in list(self.engines.items()):
                self._route(self.coordinator.on_replica(name, engine.report(), now))
            self._route(self.coordinator.tick(now))

    # ------------------------------------------------------------------------------------------------------ Outbound

    def to_replica(self, replica_id: str, message: Message) -> bool:
        return self._submit("router", replica_id, message)

    def to_coordinator(self, message: Message) -> bool:
        if not self._lose("coordinator", message):
            self._route(self.coordinator.on_router("router", message, time.monotonic()))  # type: ignore[arg-type]
        return True

    def to_ingress(self, ingress_id: str, message: Message) -> bool:
        del ingress_id
        assert isinstance(message, Delivered | Failed)
        if message.request_id in self._inboxes:
            self._inboxes[message.request_id].put_nowait(message)
        return True

    def _submit(self, sender: str, replica_id: str, message: Message) -> bool:
        engine = self.engines.get(replica_id)
        if engine is None:
            return False
        if not self._lose(replica_id, message):
            engine.submit(sender, [message])
        return True

    def _route(self, messages: Sequence[Outgoing]) -> None:
        for outgoing in messages:
            if outgoing.to_kind == "router":
                self.router.on_coordinator(outgoing.message)
            else:
                self._submit("coordinator", outgoing.to_id, outgoing.message)

    def _deliver_of(self, name: str) -> Callable[[Sequence[tuple[object, Message]]], None]:
        def deliver(replies: Sequence[tuple[object, Message]]) -> None:
            self._loop.call_soon_threadsafe(self._receive, name, list(replies))

        return deliver

    def _receive(self, name: str, replies: Sequence[tuple[object, Message]]) -> None:
        for sender, message in replies:
            if name not in self.engines or self._lose(name, message):
                continue
            if sender == "router":
                self.router.on_replica(message)
            else:
                now = time.monotonic()
                self._route(self.coordinator.on_replica(name, message, now))  # type: ignore[arg-type]


def _lose_nothing(_: str, __: Message) -> bool:
    return False


@asynccontextmanager
async def running(
    backends: Mapping[str, Backend], settings: RouterSettings | None = None, lose: Lose = _lose_nothing
) -> AsyncIterator[InProcessCluster]:
    """A cluster that serves during the block."""
    cluster = InProcessCluster(backends, settings or RouterSettings(tuple(backends)), lose)
    cluster.start()
    ticking = asyncio.create_task(cluster.tick())
    try:
        yield cluster
    finally:
        ticking.cancel()
        await cluster.stop()
