"""Router, coordinator and engines of one app in one process: the same cores and messages, without Ray and sockets.

For tests and benchmarks of what the cores do. Each engine has its own thread; everything else runs on one event loop.
`lose` is a fault to inject: a message for which it returns True never arrives.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from benchmarks.joined import AUTO, JoinedCores, Output, RequestFailed
from kvstate.protocol import Message
from models.backend import Backend
from models.engine import Engine
from router.settings import RouterSettings

__all__ = ["AUTO", "InProcessCluster", "Output", "RequestFailed", "running"]

STOP_S = 30.0
Lose = Callable[[str, Message], bool]


class InProcessCluster(JoinedCores):
    """`backends`: model name → backend, cheapest first, target last. Use `running`."""

    def __init__(self, backends: Mapping[str, Backend], settings: RouterSettings, lose: Lose) -> None:
        super().__init__(tuple(backends), settings, time.monotonic, time.thread_time)
        self._loop = asyncio.get_running_loop()
        self._lose = lose
        self.backends = backends
        self.engines = {name: Engine(backend, self._deliver_of(name)) for name, backend in backends.items()}
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._connect()
        for name in self.engines:
            self.add_replica(name)

    def add_replica(self, name: str) -> None:
        """Profile, start and register the engine of `name`; a lost one comes back with nothing."""
        engine = self.engines[name]
        profile = engine.profile()
        self._threads.append(threading.Thread(target=engine.run, name=name, daemon=True))
        self._threads[-1].start()
        self._register(name, name, self.backends[name], profile)

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

    async def tick(self) -> None:
        await self._tick()

    def to_coordinator(self, message: Message) -> bool:
        return self._lose("coordinator", message) or super().to_coordinator(message)

    def _submit(self, sender: str, replica_id: str, message: Message) -> bool:
        engine = self.engines.get(replica_id)
        if engine is None:
            return False
        if not self._lose(replica_id, message):
            engine.submit(sender, [message])
        return True

    def _deliver_of(self, name: str) -> Callable[[Sequence[tuple[object, Message]]], None]:
        def deliver(replies: Sequence[tuple[object, Message]]) -> None:
            self._loop.call_soon_threadsafe(self._receive_all, name, list(replies))

        return deliver

    def _receive_all(self, name: str, replies: Sequence[tuple[object, Message]]) -> None:
        for sender, message in replies:
            if name in self.engines and not self._lose(name, message):
                self._receive(name, sender, message)


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
