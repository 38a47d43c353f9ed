"""Router, coordinator and engines of one app on a virtual clock: the cores themselves, over simulated links.

It knows messages only: whatever the router comes to send, it is carried. Use inside `benchmarks.simulation.clock.run`.
"""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.simulation.links import Link
from benchmarks.simulation.profile import Profile
from benchmarks.simulation.replica import BLOCK_TOKENS, SimulatedReplica
from kvstate.coordinator import CoordinatorCore, Outgoing
from kvstate.protocol import (
    CancelRequest,
    Delivered,
    Failed,
    Message,
    OpenRequest,
    Register,
    ReplicaInfo,
    Sampling,
    SpecMetrics,
    Speculation,
)
from router.service import RouterCore

NUM_BLOCKS = 20_000
REPORT_S = 1.0
DEADLINE_S = 1e6
AUTO = Speculation()


@dataclass(slots=True)
class Result:
    """Of one request; seconds of the virtual clock."""

    asked_s: float
    tokens: list[int] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
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


class SimulatedCluster:
    """Serves from its making on."""

    def __init__(self, profile: Profile) -> None:
        self.loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._inboxes: dict[str, asyncio.Queue[Delivered | Failed]] = {}
        self.coordinator = CoordinatorCore(tuple(m.name for m in profile.models))
        self.router = RouterCore(profile.settings, self, generation=1, clock=self.loop.time, work_clock=lambda: 0.0)
        self.replicas: dict[str, SimulatedReplica] = {}
        self._to_replica: dict[str, Link] = {}
        self._from_replica: dict[str, Link] = {}
        self._route(self.coordinator.router_connected("router", self.loop.time()))
        for rank, model in enumerate(profile.models):
            for number in range(model.replicas):
                name = model.name if model.replicas == 1 else f"{model.name}#{number}"
                replica = SimulatedReplica(model.name, rank, model.spec, NUM_BLOCKS, partial(self._reply, name))
                self._to_replica[name], self._from_replica[name] = Link(model.link), Link(model.link)
                self._register(name, model.name, replica)
        self._reporting = asyncio.create_task(self._report())

    async def generate(
        self, prompt: Sequence[int], tokens: int, speculation: Speculation = AUTO, sampling: Sampling | None = None
    ) -> Result:
        """One request to its end."""
        request_id, result = str(next(self._ids)), Result(self.loop.time())
        inbox = self._inboxes[request_id] = asyncio.Queue()
        asked = (tuple(prompt), sampling or Sampling(), tokens, (), DEADLINE_S, (), speculation)
        self.router.on_ingress("simulation", OpenRequest(request_id, *asked))
        try:
            while True:
                part = await inbox.get()
                assert isinstance(part, Delivered), part
                result.tokens.extend(part.tokens)
                result.parts.append(len(part.tokens))
                result.arrived_s.append(self.loop.time())
                if part.finish_reason is not None:
                    result.metrics = part.metrics
                    return result
        finally:
            del self._inboxes[request_id]
            self.router.on_ingress("simulation", CancelRequest(request_id))

    async def close(self) -> None:
        self._reporting.cancel()
        await self.router.close()

    @property
    def messages(self) -> int:
        """Between router and replicas, both ways."""
        return sum(link.messages for links in (self._to_replica, self._from_replica) for link in links.values())

    # ------------------------------------------------------------------------------------------------------ Outbound

    def to_replica(self, replica_id: str, message: Message) -> bool:
        self._send("router", replica_id, message)
        return True

    def to_coordinator(self, message: Message) -> bool:
        self._route(self.coordinator.on_router("router", message, self.loop.time()))  # type: ignore[arg-type]
        return True

    def to_ingress(self, ingress_id: str, message: Message) -> bool:
        del ingress_id
        assert isinstance(message, Delivered | Failed)
        if message.request_id in self._inboxes:
            self._inboxes[message.request_id].put_nowait(message)
        return True

    # ------------------------------------------------------------------------------------------------------- messages

    def _register(self, name: str, model: str, replica: SimulatedReplica) -> None:
        self.replicas[name] = replica
        backend = replica.backend
        info = ReplicaInfo(
            name, model, "simulated", name, backend.vocabulary, backend.context_len,
            BLOCK_TOKENS, backend.num_blocks, replica.profile,
        )  # fmt: skip
        self._route(self.coordinator.on_replica(name, Register(info, ()), self.loop.time()))
        self.router.replica_connected(name)

    def _send(self, sender: str, replica_id: str, message: Message) -> None:
        self._to_replica[replica_id].send(message, partial(self.replicas[replica_id].submit, sender))

    def _reply(self, name: str, receiver: str, message: Message) -> None:
        self._from_replica[name].send(message, partial(self._receive, name, receiver))

    def _receive(self, name: str, receiver: str, message: Message) -> None:
        if receiver == "router":
            self.router.on_replica(message)
        else:
            self._route(self.coordinator.on_replica(name, message, self.loop.time()))  # type: ignore[arg-type]

    def _route(self, messages: Sequence[Outgoing]) -> None:
        for outgoing in messages:
            if outgoing.to_kind == "router":
                self.router.on_coordinator(outgoing.message)
            else:
                self._send("coordinator", outgoing.to_id, outgoing.message)

    async def _report(self) -> None:
        """Heartbeats, without which the coordinator would take replicas for lost."""
        while True:
            await asyncio.sleep(REPORT_S)
            now_s = self.loop.time()
            for name, replica in self.replicas.items():
                self._route(self.coordinator.on_replica(name, replica.engine.report(), now_s))
            self._route(self.coordinator.tick(now_s))
