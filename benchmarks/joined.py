"""Router and coordinator of one app joined to its engines without Ray and sockets: what such clusters have in common.

How messages reach an engine, and by which clock, is theirs (`benchmarks/inprocess.py`, `benchmarks/simulation/`).
"""

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.stopwatch import Stopwatch
from kvstate.coordinator import CoordinatorCore, FromReplica, FromRouter, Outgoing
from kvstate.protocol import (
    CancelRequest,
    Delivered,
    Failed,
    FinishReason,
    Logprobs,
    Message,
    OpenRequest,
    Profile,
    Register,
    ReplicaInfo,
    Sampling,
    SpecMetrics,
    Speculation,
)
from models.backend import Backend
from models.engine import Engine
from router.driver import RoundDriver
from router.service import RouterCore
from router.settings import RouterSettings

AUTO = Speculation()
TICK_S = 0.05


class RequestFailed(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, message


@dataclass(slots=True)
class Output:
    """`arrived_s[i]`: when the i-th part came; `parts[i]`: its number of tokens. Times are of the cluster's clock."""

    asked_s: float
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

    @property
    def latency_s(self) -> float:
        return self.arrived_s[-1] - self.asked_s

    @property
    def mean_length(self) -> float:
        """Tokens per check of the target."""
        assert self.metrics is not None
        return 1.0 + self.metrics.accepted_draft_tokens / max(1, self.metrics.rounds)


def tokens_per_s(outputs: Sequence[Output]) -> float:
    """From when the first was asked for to when the last was there."""
    seconds = max(output.arrived_s[-1] for output in outputs) - min(output.asked_s for output in outputs)
    return sum(len(output.tokens) for output in outputs) / seconds


class JoinedCores(ABC):
    """`now`: seconds. `engines` by replica id. `others`: processor time of this thread that is not the router's.

    Implements the router's `Outbound`.
    """

    ticks_per_report = 1
    """Heartbeats at each tick: threads that hog the interpreter can keep the loop from ticking for seconds."""

    def __init__(
        self,
        models: Sequence[str],
        settings: RouterSettings,
        now: Callable[[], float],
        work_clock: Callable[[], float],
        driver: type[RoundDriver] = RoundDriver,
    ) -> None:
        self._now = now
        self._ids = itertools.count()
        self._inboxes: dict[str, asyncio.Queue[Delivered | Failed]] = {}
        self.engines: dict[str, Engine] = {}
        self.others = Stopwatch()
        self.coordinator = CoordinatorCore(tuple(models))
        self.router = RouterCore(settings, self, generation=1, clock=now, work_clock=work_clock, driver=driver)

    @abstractmethod
    def _submit(self, sender: str, replica_id: str, message: Message) -> bool:
        """Send to a replica; False where there is none."""

    def _connect(self) -> None:
        """Router and coordinator, before any replica."""
        self._route(self.coordinator.router_connected("router", self._now()))

    def _register(self, replica_id: str, model: str, backend: Backend, profile: Profile) -> None:
        info = ReplicaInfo(
            replica_id, model, "here", "joined", backend.vocabulary, backend.context_len,
            backend.block_tokens, backend.num_blocks, profile,
        )  # fmt: skip
        self._from_replica(replica_id, Register(info, ()))
        self.router.replica_connected(replica_id)

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
        output = Output(self._now())
        async for part in self.stream(prompt, sampling, max_tokens, stop_ids, speculation, deadline_s, logprobs):
            output.tokens.extend(part.tokens)
            output.logprobs.extend(part.logprobs)
            output.parts.append(len(part.tokens))
            output.arrived_s.append(self._now())
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
        self.router.on_ingress("joined", request)
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
            self.router.on_ingress("joined", CancelRequest(request_id))

    async def _tick(self) -> None:
        """Heartbeats, without which the coordinator would take replicas for lost, and what it does by time."""
        for number in itertools.count(1):
            await asyncio.sleep(TICK_S)
            if number % self.ticks_per_report == 0:
                for replica_id, engine in list(self.engines.items()):
                    self._from_replica(replica_id, engine.report())
            with self.others:
                messages = self.coordinator.tick(self._now())
            self._route(messages)

    # ------------------------------------------------------------------------------------------------------ Outbound

    def to_replica(self, replica_id: str, message: Message) -> bool:
        return self._submit("router", replica_id, message)

    def to_coordinator(self, message: Message) -> bool:
        assert isinstance(message, FromRouter)
        with self.others:
            messages = self.coordinator.on_router("router", message, self._now())
        self._route(messages)
        return True

    def to_ingress(self, ingress_id: str, message: Message) -> bool:
        del ingress_id
        assert isinstance(message, Delivered | Failed)
        if message.request_id in self._inboxes:
            self._inboxes[message.request_id].put_nowait(message)
        return True

    # ------------------------------------------------------------------------------------------------------- replies

    def _receive(self, replica_id: str, receiver: object, message: Message) -> None:
        """A reply of an engine, to whom it answers."""
        if receiver == "router":
            self.router.on_replica(message)
        else:
            self._from_replica(replica_id, message)

    def _from_replica(self, replica_id: str, message: Message) -> None:
        assert isinstance(message, FromReplica)
        with self.others:
            messages = self.coordinator.on_replica(replica_id, message, self._now())
        self._route(messages)

    def _route(self, messages: Sequence[Outgoing]) -> None:
        for outgoing in messages:
            if outgoing.to_kind == "router":
                self.router.on_coordinator(outgoing.message)
            else:
                self._submit("coordinator", outgoing.to_id, outgoing.message)
