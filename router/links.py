"""The router's way to the others, and the waiting for a replica's answer to a step.

Knows no sockets: `Outbound` is implemented by the shell (and by in-process clusters). A reply is matched by sequence
and key; one whose key nobody waits for is ignored.
"""

import asyncio
from typing import NamedTuple, Protocol

from kvstate.protocol import AnyMessage, Key, Step, StepReply


class Outbound(Protocol):
    """Each call returns False when there is no open stream to that side; it never blocks."""

    def to_replica(self, replica_id: str, message: AnyMessage) -> bool: ...

    def to_coordinator(self, message: AnyMessage) -> bool: ...

    def to_ingress(self, ingress_id: str, message: AnyMessage) -> bool: ...


class ReplicaLost(Exception):
    """The replica's stream is broken, or it left a step unanswered."""

    def __init__(self, replica_id: str) -> None:
        super().__init__(replica_id)
        self.replica_id = replica_id


class _Waiting(NamedTuple):
    replica_id: str
    due_s: float
    reply: asyncio.Future[StepReply | None]


class StepCalls:
    """Steps under way. `start` sends one, `call` also waits; `resolve` and `fail` are fed by the streams.

    All wait equally long, `timeout_s`, so the first to be sent is the first to be due: one timer serves them all.
    """

    def __init__(self, outbound: Outbound, timeout_s: float) -> None:
        self._outbound = outbound
        self._timeout_s = timeout_s
        self._waiting: dict[tuple[int, Key], _Waiting] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def call(self, replica_id: str, step: Step) -> StepReply | None:
        """The reply; None when none came in `timeout_s` (a frame was lost, or the replica is slow).

        Raises ReplicaLost when the stream is broken, also while waiting.
        """
        reply = self.start(replica_id, step)
        try:
            return await reply
        finally:
            self._waiting.pop((step.seq, step.key), None)

    def start(self, replica_id: str, step: Step) -> "asyncio.Future[StepReply | None]":
        """What `call` waits for. Cancel it when nobody will: a reply that comes later is then ignored."""
        loop, key = asyncio.get_running_loop(), (step.seq, step.key)
        waiting = _Waiting(replica_id, loop.time() + self._timeout_s, loop.create_future())
        self._waiting[key] = waiting
        waiting.reply.add_done_callback(lambda _: self._waiting.pop(key, None))
        if not self._outbound.to_replica(replica_id, step):
            waiting.reply.set_exception(ReplicaLost(replica_id))
        elif self._timer is None:
            self._timer = loop.call_at(waiting.due_s, self._give_up_overdue, loop)
        return waiting.reply

    def resolve(self, reply: StepReply) -> None:
        waiting = self._waiting.get((reply.seq, reply.key))
        if waiting is not None and not waiting.reply.done():
            waiting.reply.set_result(reply)

    def fail(self, replica_id: str) -> None:
        """Every step under way at this replica ends with ReplicaLost."""
        for waiting in self._waiting.values():
            if waiting.replica_id == replica_id and not waiting.reply.done():
                waiting.reply.set_exception(ReplicaLost(replica_id))

    def _give_up_overdue(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        for waiting in self._waiting.values():
            if waiting.reply.done():
                continue
            if waiting.due_s > loop.time():
                self._timer = loop.call_at(waiting.due_s, self._give_up_overdue, loop)
                return
            waiting.reply.set_result(None)
