"""The KV-state coordinator without its sockets: every event returns the messages that follow from it.

Keeps all holders of a sequence on the same committed tokens, admits sequences to replicas with room, and closes them
everywhere when they end. It is never on the path of a round: routers tell it what was committed and go on.

What the shell around it must do: give the events of one stream in order; call `replica_lost` only for the stream that
carried the replica's latest Register; call `tick` at least every 50 ms; close a replica's stream on RegistrationError
(the replica dials again and registers with what it holds).

    RegistrationError
    ├── UnknownModel         the app has no model of that name
    ├── VocabularyMismatch   token ids would not mean the same
    └── NotRegistered        a message before Register, or after the replica was taken for lost

What it does not know: prompts, unless the router commits them from position 0; and how to sample, so a copy that was
never opened, or was dropped, is remembered as lost until the router's own messages have brought it back.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

from kvstate.admission import Admission, Answers
from kvstate.ledger import Holder, Lag, Ledger, Replica, Running, Stray
from kvstate.protocol import (
    Acked,
    Admit,
    Admitted,
    AnyMessage,
    Close,
    Closed,
    Commit,
    Committed,
    Finish,
    Held,
    Members,
    Register,
    ReplicaInfo,
    Report,
    Resume,
)

logger = logging.getLogger(__name__)

MOST_RETRY_S = 2.0


class RegistrationError(Exception):
    """The stream of this replica must be closed."""


class UnknownModel(RegistrationError):
    def __init__(self, model: str, models: tuple[str, ...]) -> None:
        super().__init__(model, models)
        self.model, self.models = model, models

    def __str__(self) -> str:
        return f"no model is named {self.model!r}; there are {', '.join(self.models)}"


class VocabularyMismatch(RegistrationError):
    def __init__(self, model: str, vocabulary: str, other_model: str, other_vocabulary: str) -> None:
        super().__init__(model, vocabulary, other_model, other_vocabulary)
        self.model, self.vocabulary = model, vocabulary
        self.other_model, self.other_vocabulary = other_model, other_vocabulary

    def __str__(self) -> str:
        return (
            f"vocabularies disagree: {self.model!r} has {self.vocabulary}, "
            f"{self.other_model!r} has {self.other_vocabulary}"
        )


class NotRegistered(RegistrationError):
    def __init__(self, replica_id: str) -> None:
        super().__init__(replica_id)
        self.replica_id = replica_id

    def __str__(self) -> str:
        return f"replica {self.replica_id} is not registered"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send. One to somebody who is not connected is dropped: everything that matters is sent again."""

    to_kind: Literal["replica", "router"]
    to_id: str
    message: AnyMessage


FromReplica = Register | Report | Acked | Closed
FromRouter = Admit | Resume | Committed | Finish


class CoordinatorCore:
    """`models`: names, cheapest first, the target last. `now` is a monotonic clock in seconds.

    gather_s  least time between two tellings of who is there
    """

    def __init__(
        self,
        models: Sequence[str],
        *,
        max_waiting: int = 256,
        lease_s: float = 30.0,
        resend_s: float = 0.1,
        gather_s: float = 0.05,
        heartbeat_timeout_s: float = 2.5,
        members_interval_s: float = 1.0,
    ) -> None:
        self.models = tuple(models)
        self.ledger = Ledger(resend_s)
        self._admission = Admission(self.ledger, models, max_waiting)
        self._lease_s = lease_s
        self._resend_s = resend_s
        self._gather_s = gather_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._members_interval_s = members_interval_s
        self._members_sent_s = float("-inf")
        self._members_changed = False
        self._routers: set[str] = set()

    @property
    def num_waiting(self) -> int:
        return len(self._admission)

    def lags(self, now: float) -> list[Lag]:
        return self.ledger.lags(now)

    def converged(self, seq: int) -> bool:
        """Whether every holder of the running sequence `seq` has acknowledged all that is committed."""
        entry = self.ledger.running.get(seq)
        return entry is not None and not any(entry.is_behind(holder) for holder in entry.holders.values())

    def check_integrity(self) -> None:
        self.ledger.check_integrity()
        self._admission.check_integrity()

    # ------------------------------------------------------------------------------------------------------ events

    def on_replica(self, replica_id: str, message: FromReplica, now: float) -> list[Outgoing]:
        """Raises RegistrationError, changing nothing, where the replica's stream must be closed."""
        if isinstance(message, Register):
            assert replica_id == message.info.replica_id, (replica_id, message.info.replica_id)
            return self._register(message, now)
        replica = self.ledger.replicas.get(replica_id)
        if replica is None or not replica.up:
            raise NotRegistered(replica_id)
        replica.last_seen_s = now
        match message:
            case Report():
                return self._report(replica, message, now)
            case Acked():
                return self._acked(replica, message, now)
            case Closed():
                return self._closed(replica, message.seq, now)
            case _:
                assert_never(message)

    def on_router(self, router_id: str, message: FromRouter, now: float) -> list[Outgoing]:
        entry = self.ledger.running.get(message.seq)
        if entry is not None and not isinstance(message, Finish):
            entry.router_id, entry.router_lost_s = router_id, None
        match message:
            case Admit():
                return self._admit(router_id, message, now)
            case Resume():
                return self._resume(router_id, message, now)
            case Committed():
                return self._committed(entry, message, now) if entry else []
            case Finish():
                return self._close(message.seq, now) + self._admit_waiting(now)
            case _:
                assert_never(message)

    def replica_lost(self, replica_id: str, now: float) -> list[Outgoing]:
        """Its stream broke. All copies it held count as closed."""
        replica = self.ledger.replicas.get(replica_id)
        if replica is None or not replica.up:
            return []
        logger.warning("replica %s of %s lost", replica_id, replica.info.model)
        self.ledger.lose(replica_id)
        return self._members_soon(now)

    def router_connected(self, router_id: str, now: float) -> list[Outgoing]:
        """There is one router at a time: what another one ran has been, or will be, opened again as new sequences."""
        self._routers.add(router_id)
        out = [Outgoing("router", router_id, Members(self.ledger.members()))]
        for entry in [e for e in self.ledger.running.values() if e.router_id != router_id]:
            out += self._close(entry.seq, now)
        return out

    def router_lost(self, router_id: str, now: float) -> list[Outgoing]:
        """Its waiting openings are forgotten; its sequences run on for `lease_s` unless they are resumed before."""
        self._routers.discard(router_id)
        self._admission.withdraw_all(router_id)
        for entry in self.ledger.running.values():
            if entry.router_id == router_id:
                entry.router_lost_s = now
        return self._admit_waiting(now)

    def tick(self, now: float) -> list[Outgoing]:
        """All that happens by time alone: losses, leases, re-issued commits and closes, the membership's refresh."""
        out: list[Outgoing] = []
        for replica in list(self.ledger.replicas.values()):
            if replica.up and now - replica.last_seen_s > self._heartbeat_timeout_s:
                out += self.replica_lost(replica.info.replica_id, now)
        self.ledger.forget_lost(before_s=now - self._lease_s)
        for entry in list(self.ledger.running.values()):
            if entry.router_lost_s is not None and now - entry.router_lost_s >= self._lease_s:
                out += self._close(entry.seq, now)
            else:
                out += self._reissue(entry, now)
        out += self._close_strays(now)
        if self._members_changed or now - self._members_sent_s >= self._members_interval_s:
            out += self._members(now)
        return out

    # --------------------------------------------------------------------------------------------------- membership

    def _register(self, message: Register, now: float) -> list[Outgoing]:
        info = message.info
        self._refuse_unfit(info)
        used_blocks = sum(-(-held.kv_len // info.block_tokens) for held in message.held)
        replica = self.ledger.register(info, max(0, info.num_blocks - used_blocks), now)
        logger.info("replica %s of %s registered, holding %s sequences", info.replica_id, info.model, len(message.held))
        for held in message.held:
            self._take_in(replica, held, now)
        return self._catch_up(replica, message.held, now) + self._members_soon(now) + self._admit_waiting(now)

    def _refuse_unfit(self, info: ReplicaInfo) -> None:
        """Vocabularies of different models were compared before the start: one may have more ids than the other."""
        if info.model not in self.models:
            raise UnknownModel(info.model, self.models)
        for other in self.ledger.of(info.model):
            if other.up and other.info.replica_id != info.replica_id and other.info.vocabulary != info.vocabulary:
                raise VocabularyMismatch(info.model, info.vocabulary, other.info.model, other.info.vocabulary)

    def _take_in(self, replica: Replica, held: Held, now: float) -> None:
        """Decide what a copy is that the replica brought along: a holder's, one to close, or nobody's so far."""
        entry = self.ledger.running.get(held.seq)
        if entry is not None and replica.info.model not in entry.holders:
            self.ledger.attach(entry, replica.info.model, replica.info.replica_id, 0, now)
        elif self.ledger.holder(held.seq, replica) is None:
            may_be_resumed = entry is None and not self.ledger.is_closed(held.seq)
            close_at_s = now + self._lease_s if may_be_resumed else now
            replica.strays[held.seq] = Stray(close_at_s, self._resend_s, held.committed_len, held.kv_len)

    def _catch_up(self, replica: Replica, helds: Sequence[Held], now: float) -> list[Outgoing]:
        """Take the lengths of all its copies of running sequences; send what they lack, and close what is over."""
        by_seq = {held.seq: held for held in helds}
        out: list[Outgoing] = []
        for entry in self.ledger.running.values():
            holder = self.ledger.holder(entry.seq, replica)
            if holder is not None:
                self._set_lengths(holder, by_seq.get(entry.seq))
                holder.retry_s = self._resend_s
                out += self._commit_to(entry, holder, now) if entry.is_behind(holder) else []
        return out + self._close_strays(now)

    def _report(self, replica: Replica, report: Report, now: float) -> list[Outgoing]:
        replica.free_blocks = max(0, min(report.free_blocks, replica.info.num_blocks))
        replica.counts = report.counts
        for seq in report.dropped:
            holder = self.ledger.holder(seq, replica)
            if holder is not None:
                # Its tokens may be gone too: the next commit's answer tells.
                holder.acked_len = holder.kv_len = 0
        return self._admit_waiting(now)

    def _members_soon(self, now: float) -> list[Outgoing]:
        """Of many that come or go together one message tells; `tick` sends what is left."""
        self._members_changed = True
        return self._members(now) if now - self._members_sent_s >= self._gather_s else []

    def _members(self, now: float) -> list[Outgoing]:
        self._members_sent_s, self._members_changed = now, False
        members = Members(self.ledger.members())
        return [Outgoing("router", router_id, members) for router_id in sorted(self._routers)]

    # ---------------------------------------------------------------------------------------------------- sequences

    def _admit(self, router_id: str, admit: Admit, now: float) -> list[Outgoing]:
        out = self._close(admit.replaces, now) if admit.replaces is not None else []
        return out + self._to_routers(self._admission.ask(router_id, admit, now), now)

    def _resume(self, router_id: str, resume: Resume, now: float) -> list[Outgoing]:
        if self.ledger.is_closed(resume.seq):
            refusal = f"sequence {resume.seq} is closed"
            return [Outgoing("router", router_id, Admitted(resume.seq, {}, refusal))]
        self._admission.withdraw(resume.seq)
        entry = self.ledger.start(resume.seq, router_id, resume.max_len, start_len=0)
        for model, replica_id in resume.holders.items():
            if model not in entry.holders:
                self._resume_holder(entry, model, replica_id, now)
        committed = Committed(resume.seq, resume.epoch, 0, resume.tokens)
        return self._committed(entry, committed, now) + self._admit_waiting(now)

    def _resume_holder(self, entry: Running, model: str, replica_id: str, now: float) -> None:
        """Whose replica has registered already tells by what it brought along; the others will when they register."""
        replica = self.ledger.replicas.get(replica_id)
        if replica is None:
            self.ledger.attach(entry, model, replica_id, 0, now)
        elif replica.up and replica.info.model == model:
            stray = replica.strays.get(entry.seq)
            self._set_lengths(self.ledger.attach(entry, model, replica_id, 0, now), stray)

    def _committed(self, entry: Running, message: Committed, now: float) -> list[Outgoing]:
        entry.record(message.epoch, message.from_len, message.tokens)
        behind = [holder for holder in entry.holders.values() if entry.is_behind(holder)]
        return [out for holder in behind for out in self._commit_to(entry, holder, now)]

    def _commit_to(self, entry: Running, holder: Holder, now: float) -> list[Outgoing]:
        """What the holder lacks; of a lost copy, one token only, to learn from the answer whether it is back."""
        if not self.ledger.is_up(holder.replica_id):
            return []
        from_len = entry.committed_len - 1 if holder.lost else min(holder.from_len, entry.committed_len)
        from_len = max(from_len, entry.start_len)
        holder.sent_s = now
        commit = Commit(entry.seq, entry.epoch, from_len, entry.tokens_from(from_len))
        return [Outgoing("replica", holder.replica_id, commit)]

    def _acked(self, replica: Replica, acked: Acked, now: float) -> list[Outgoing]:
        entry, holder = self.ledger.running.get(acked.seq), self.ledger.holder(acked.seq, replica)
        if entry is None or holder is None:
            return []
        knows_less = not acked.unknown and (holder.lost or acked.committed_len < holder.from_len)
        if acked.unknown:
            self._set_lengths(holder, None)
            return []
        if holder.lost or acked.committed_len > holder.acked_len:
            holder.retry_s = self._resend_s
        self._set_lengths(holder, acked)
        can_help = entry.is_behind(holder) and holder.from_len >= entry.start_len
        return self._commit_to(entry, holder, now) if knows_less and can_help else []

    def _set_lengths(self, holder: Holder, lengths: Acked | Held | Stray | None) -> None:
        """What the holder says that it knows; None: it knows nothing of the sequence."""
        holder.lost = lengths is None
        holder.acked_len = holder.from_len = lengths.committed_len if lengths else 0
        holder.kv_len = lengths.kv_len if lengths else 0

    def _reissue(self, entry: Running, now: float) -> list[Outgoing]:
        out: list[Outgoing] = []
        for model, holder in list(entry.holders.items()):
            waited_s = now - holder.sent_s
            if holder.replica_id not in self.ledger.replicas and waited_s >= self._lease_s:
                del entry.holders[model]  # resumed on a replica that never came
            elif entry.is_behind(holder) and waited_s >= holder.retry_s:
                out += self._commit_to(entry, holder, now)
                holder.retry_s = min(2 * holder.retry_s, MOST_RETRY_S)
        return out

    def _close(self, seq: int, now: float) -> list[Outgoing]:
        self._admission.withdraw(seq)
        self.ledger.close(seq, now)
        return self._close_strays(now)

    def _close_strays(self, now: float) -> list[Outgoing]:
        out: list[Outgoing] = []
        for replica in self.ledger.replicas.values():
            for seq, stray in replica.strays.items():
                if stray.close_at_s <= now:
                    out.append(Outgoing("replica", replica.info.replica_id, Close(seq)))
                    stray.close_at_s = now + stray.retry_s
                    stray.retry_s = min(2 * stray.retry_s, MOST_RETRY_S)
        return out

    def _closed(self, replica: Replica, seq: int, now: float) -> list[Outgoing]:
        holder = self.ledger.holder(seq, replica)
        if holder is not None:
            # Nobody's copy that was being closed when the router resumed it.
            self._set_lengths(holder, None)
        self.ledger.release(replica, seq)
        return self._admit_waiting(now)

    def _admit_waiting(self, now: float) -> list[Outgoing]:
        return self._to_routers(self._admission.serve(now), now)

    def _to_routers(self, answers: Answers, now: float) -> list[Outgoing]:
        """No answer names a replica that the router was not told of."""
        members = self._members(now) if answers and self._members_changed else []
        return members + [Outgoing("router", router_id, message) for router_id, message in answers]
