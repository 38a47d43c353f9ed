"""Steps of one sequence at its holders: opening, sending, resending what a holder lacks, and what each reply tells.

Nothing here knows Ray, sockets or tensors: messages go through `StepCalls` and `Outbound`.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstate.protocol import Check, Draft, Drafted, Need, Open, Probed, Step, StepReply, Verdict
from router.checks import Observer
from router.links import Outbound, ReplicaLost, StepCalls
from router.sequence import Holder, RunningSequence

ATTEMPTS = 4
"""Sends of one step before its replica counts as lost: two lost frames and a reopened sequence fit in.

A target that is only silent is waited for until the request's deadline: it may have long prompts of others before it,
and there is nothing to go on without it. A stream that breaks, as it does when heartbeats are missed, ends every wait.
"""

MOST_BEHIND, MOST_PROBE_BEHIND = 32, 128
CATCH_UP = "catch_up"
"""The kind of a step that computes more rows than rounds ever leave behind: a prefill, or a level that joins again."""

Make = Callable[[Holder], Step]


@dataclass(frozen=True, slots=True)
class _Sent:
    holder: Holder
    kind: str
    step: Step
    at_s: float


class Steps:
    """Of one sequence, whose holders may be taken away between two steps."""

    def __init__(
        self,
        sequence: RunningSequence,
        calls: StepCalls,
        outbound: Outbound,
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self.sequence = sequence
        self._calls = calls
        self._outbound = outbound
        self._observer = observer
        self._clock = clock

    async def run(self, model: str, kind: str, make: Make, is_target: bool = False) -> StepReply:
        """Send a step until it is answered; resend what the holder needs. ReplicaLost after too many tries."""
        holder, attempts = self.holder(model), 0
        while attempts < ATTEMPTS:
            sent = self._made(holder, kind, make)
            answer = await self._calls.call(holder.replica_id, sent.step)
            reply = self._taken(sent, answer)
            if reply is not None:
                return reply
            attempts += answer is not None or not is_target
        raise ReplicaLost(holder.replica_id)

    def start(self, model: str, kind: str, make: Make) -> "asyncio.Future[StepReply | None]":
        """Send a step once. None: it was not done, and the next one will bring what the holder lacked."""
        sent = self._made(self.holder(model), kind, make)
        waiting = self._calls.start(sent.holder.replica_id, sent.step)
        taken: asyncio.Future[StepReply | None] = asyncio.get_running_loop().create_future()

        def take(answered: "asyncio.Future[StepReply | None]") -> None:
            if taken.done() or answered.cancelled():
                return
            error = answered.exception()
            if error is not None:
                taken.set_exception(error)
            else:
                taken.set_result(self._taken(sent, answered.result()))

        waiting.add_done_callback(take)
        taken.add_done_callback(lambda _: waiting.cancel())
        return taken

    def holder(self, model: str) -> Holder:
        """Raises ReplicaLost."""
        holder = self.sequence.holders.get(model)
        if holder is None:
            raise ReplicaLost(model)
        return holder

    def open(self, holder: Holder) -> None:
        """The first message to a holder, and the one after it lost the sequence."""
        if not holder.opened:
            s = self.sequence
            message = Open(s.seq, tuple(s.tokens), s.prompt_len, s.sampling)
            holder.opened = self._outbound.to_replica(holder.replica_id, message)
            holder.acked_len = len(s.tokens)

    def draft(
        self, holder: Holder, held: Sequence[int], count: int, stop_below: float = 0.0, num_guesses: int = 0
    ) -> Draft:
        s, given = self.sequence, self._from(holder, held)
        key, known = s.next_key(), (len(s.tokens), holder.acked_len)
        return Draft(s.seq, key, *known, given, count, stop_below, num_guesses)

    def check(
        self,
        holder: Holder,
        tokens: Sequence[int],
        count: int,
        logprobs: int,
        num_top: int,
        parents: tuple[int, ...] = (),
    ) -> Check:
        s, given = self.sequence, self._from(holder, tokens)
        return Check(s.seq, s.next_key(), len(s.tokens), holder.acked_len, given, count, logprobs, num_top, parents)

    def post_prefill(self, model: str) -> None:
        """A drafter computes the sequence's KV; nobody waits for it."""
        holder = self.sequence.holders[model]
        self.open(holder)
        holder.is_reading = self._outbound.to_replica(holder.replica_id, self.draft(holder, (), 0))

    def _made(self, holder: Holder, kind: str, make: Make) -> "_Sent":
        self.open(holder)
        sent_s, step = self._clock(), make(holder)
        most_behind = MOST_PROBE_BEHIND if kind == "probe" else MOST_BEHIND
        is_behind = step.from_len + len(step.tokens) - holder.kv_len > most_behind
        return _Sent(holder, CATCH_UP if is_behind else kind, step, sent_s)

    def _taken(self, sent: "_Sent", reply: StepReply | None) -> StepReply | None:
        """What a reply tells of its holder; the reply itself where the step was done."""
        holder = sent.holder
        match reply:
            case None:
                holder.opened = False
                return None
            case Need(from_len=from_len, unknown=unknown):
                holder.acked_len, holder.opened = from_len, not unknown
                return None
            case Drafted() | Verdict() | Probed():
                holder.acked_len, holder.kv_len = reply.committed_len, reply.kv_len
                if self.sequence.holders.get(holder.model) is holder:  # not of a replica that is gone
                    self._observer.timing(holder, sent.kind, reply.timing, self._clock() - sent.at_s)
                return reply

    def _from(self, holder: Holder, held: Sequence[int]) -> tuple[int, ...]:
        return (*self.sequence.tokens[holder.acked_len :], *held)
