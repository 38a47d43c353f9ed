"""The coordinator's books: who is there, which sequences run, who holds them up to where, and what room is promised.

Pure bookkeeping: sends nothing and decides nothing. It knows neither the truth about a replica's room (its allocator
does) nor tokens that the router never told it: those below a sequence's `start_len` came to the holders by other ways.

A sequence is *running* from its admission until it is closed. Closing makes each holder's copy a *stray*, which keeps
its reservation until the replica says that it is gone; copies that a replica reports and nobody owns are strays too.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvstate.protocol import Member, ReplicaCounts, ReplicaInfo
from kvstate.sequence import ConflictingCommit


@dataclass(slots=True)
class Stray:
    """A copy to be closed: the next Close goes out at `close_at_s`, the one after it `retry_s` later.

    `committed_len` and `kv_len` as the replica stated when it registered.
    """

    close_at_s: float
    retry_s: float
    committed_len: int = 0
    kv_len: int = 0


@dataclass(slots=True)
class Replica:
    """`reserved`: blocks promised per sequence, strays included. `free_blocks`: as last reported."""

    info: ReplicaInfo
    up: bool
    last_seen_s: float
    free_blocks: int
    counts: ReplicaCounts = ReplicaCounts()
    reserved: dict[int, int] = field(default_factory=dict)
    strays: dict[int, Stray] = field(default_factory=dict)

    @property
    def room_blocks(self) -> int:
        """Blocks neither promised nor in use by a sequence that nothing was promised to."""
        return min(self.info.num_blocks - sum(self.reserved.values()), self.free_blocks)

    def blocks_for(self, max_len: int) -> int | None:
        """Blocks to reserve for a sequence of `max_len` tokens, one to spare if there is; None where it never fits."""
        needed = -(-max_len // self.info.block_tokens)
        if max_len > self.info.context_len or needed > self.info.num_blocks:
            return None
        return min(needed + 1, self.info.num_blocks)

    def has_room(self, max_len: int) -> bool:
        blocks = self.blocks_for(max_len)
        return self.up and blocks is not None and blocks <= self.room_blocks


@dataclass(slots=True)
class Holder:
    """One replica's copy: the next commit to it starts at `from_len`. `lost`: it was never opened, or dropped."""

    replica_id: str
    from_len: int
    sent_s: float
    retry_s: float
    acked_len: int = 0
    kv_len: int = 0
    lost: bool = False


@dataclass(slots=True)
class Running:
    """A running sequence: permanent `tokens` at positions [start_len, committed_len), holders by model name."""

    seq: int
    router_id: str
    max_len: int
    start_len: int
    epoch: int = 0
    tokens: list[int] = field(default_factory=list)
    holders: dict[str, Holder] = field(default_factory=dict)
    router_lost_s: float | None = None

    @property
    def committed_len(self) -> int:
        return self.start_len + len(self.tokens)

    def replica_ids(self) -> dict[str, str]:
        """Model name → replica id of its holder."""
        return {model: holder.replica_id for model, holder in self.holders.items()}

    def tokens_from(self, position: int) -> tuple[int, ...]:
        assert position >= self.start_len
        return tuple(self.tokens[position - self.start_len :])

    def is_behind(self, holder: Holder) -> bool:
        """Whether there is a commit that the holder has not acknowledged."""
        return bool(self.tokens) and holder.acked_len < self.committed_len

    def record(self, epoch: int, from_len: int, tokens: Sequence[int]) -> None:
        """Take over permanent tokens, in any order and any number of times.

        After a hole only what follows it is kept: the holders learn the tokens between from the router's own messages.
        Raises ConflictingCommit, changing nothing, if a position that is known differs.
        """
        end = from_len + len(tokens)
        if not tokens:
            return
        if from_len > self.committed_len or (not self.tokens and end >= self.start_len):
            self.start_len, self.tokens = from_len, list(tokens)
        elif end >= self.start_len:
            self._check_overlap(from_len, tokens)
            self.tokens.extend(tokens[max(0, self.committed_len - from_len) :])
            if from_len < self.start_len:
                self.tokens[:0] = tokens[: self.start_len - from_len]
                self.start_len = from_len
        self.epoch = max(self.epoch, epoch)

    def _check_overlap(self, from_len: int, tokens: Sequence[int]) -> None:
        start = max(from_len, self.start_len)
        known = self.tokens[start - self.start_len :]
        for i, (mine, theirs) in enumerate(zip(known, tokens[start - from_len :], strict=False)):
            if mine != theirs:
                raise ConflictingCommit(self.seq, start + i, mine, theirs)


@dataclass(frozen=True, slots=True)
class Lag:
    """How far one holder is behind: `behind_tokens` committed but not acknowledged, last sent `waiting_s` ago."""

    seq: int
    model: str
    replica_id: str
    committed_len: int
    acked_len: int
    behind_tokens: int
    waiting_s: float


class Ledger:
    """All replicas and running sequences; `num_tombstones` closed ids are kept. First retries come after `resend_s`."""

    def __init__(self, resend_s: float, num_tombstones: int = 65536) -> None:
        self.replicas: dict[str, Replica] = {}
        self._by_model: defaultdict[str, dict[str, Replica]] = defaultdict(dict)
        self.running: dict[int, Running] = {}
        self._resend_s = resend_s
        self._num_tombstones = num_tombstones
        self._tombstones: OrderedDict[int, None] = OrderedDict()

    def is_closed(self, seq: int) -> bool:
        """Whether `seq` has run and is over. Such ids are never used again."""
        return seq in self._tombstones

    def register(self, info: ReplicaInfo, free_blocks: int, now: float) -> Replica:
        """A replica is up. What was promised to running sequences on it stays; strays are to be reported anew."""
        replica = Replica(info, up=True, last_seen_s=now, free_blocks=min(free_blocks, info.num_blocks))
        before = self.replicas.get(info.replica_id)
        if before is not None:
            del self._by_model[before.info.model][info.replica_id]
        self.replicas[info.replica_id] = self._by_model[info.model][info.replica_id] = replica
        for entry in self.running.values():
            if self.holder(entry.seq, replica) is not None:
                self._reserve(replica, entry)
        return replica

    def forget_lost(self, before_s: float) -> None:
        """Drop replicas that are down and were last seen before `before_s`, so that restarts do not pile up."""
        for replica in [r for r in self.replicas.values() if not r.up and r.last_seen_s < before_s]:
            del self.replicas[replica.info.replica_id], self._by_model[replica.info.model][replica.info.replica_id]

    def lose(self, replica_id: str) -> None:
        """A replica is down, and with it all copies it held."""
        replica = self.replicas[replica_id]
        replica.up = False
        replica.reserved.clear()
        replica.strays.clear()
        for entry in self.running.values():
            entry.holders = {m: h for m, h in entry.holders.items() if h.replica_id != replica_id}

    def start(self, seq: int, router_id: str, max_len: int, start_len: int) -> Running:
        """A sequence runs, so far without holders; one that runs already stays as it is."""
        return self.running.setdefault(seq, Running(seq, router_id, max_len, start_len))

    def attach(self, entry: Running, model: str, replica_id: str, from_len: int, now: float) -> Holder:
        """Make the replica, which may be yet to register, the model's holder and promise it room. No stray any more."""
        holder = Holder(replica_id, from_len, sent_s=now, retry_s=self._resend_s)
        entry.holders[model] = holder
        replica = self.replicas.get(replica_id)
        if replica is not None and replica.up:
            replica.strays.pop(entry.seq, None)
            self._reserve(replica, entry)
        return holder

    def holder(self, seq: int, replica: Replica) -> Holder | None:
        """The copy of a running sequence on this replica."""
        entry = self.running.get(seq)
        holder = entry.holders.get(replica.info.model) if entry else None
        return holder if holder is not None and holder.replica_id == replica.info.replica_id else None

    def is_up(self, replica_id: str) -> bool:
        replica = self.replicas.get(replica_id)
        return replica is not None and replica.up

    def close(self, seq: int, now: float) -> None:
        """The sequence is over: every copy of it becomes a stray to be closed now."""
        self.running.pop(seq, None)
        self._tombstones[seq] = None
        if len(self._tombstones) > self._num_tombstones:
            self._tombstones.popitem(last=False)
        for replica in self.replicas.values():
            if seq in replica.reserved or seq in replica.strays:
                replica.strays[seq] = Stray(now, self._resend_s)

    def release(self, replica: Replica, seq: int) -> None:
        """A stray is gone: what was promised to it is free, and so is what it used until the next report says more."""
        if replica.strays.pop(seq, None) is not None:
            freed = replica.reserved.pop(seq, 0)
            replica.free_blocks = min(replica.info.num_blocks, replica.free_blocks + freed)

    def best_replica(self, model: str, max_len: int, preferred: Sequence[str] = ()) -> Replica | None:
        """Of the replicas of `model` with enough room the first preferred one, else the one with most."""
        known = self._by_model[model]
        wished = (known[replica_id] for replica_id in preferred if replica_id in known)
        fitting = (replica for replica in known.values() if replica.has_room(max_len))
        first = next((replica for replica in wished if replica.has_room(max_len)), None)
        return first or max(fitting, key=lambda r: r.room_blocks, default=None)

    def never_fits(self, model: str, max_len: int) -> bool:
        """Whether replicas of `model` are known, and none of them could hold the sequence even when empty."""
        known = self.of(model)
        return bool(known) and all(replica.blocks_for(max_len) is None for replica in known)

    def members(self) -> tuple[Member, ...]:
        return tuple(
            Member(r.info, r.up, len(r.reserved), r.free_blocks if r.up else r.info.num_blocks, r.counts)
            for r in self.replicas.values()
        )

    def lags(self, now: float) -> list[Lag]:
        """Every holder of every running sequence, those that are level included."""
        return [
            Lag(
                seq=entry.seq,
                model=model,
                replica_id=holder.replica_id,
                committed_len=entry.committed_len,
                acked_len=holder.acked_len,
                behind_tokens=entry.committed_len - holder.acked_len if entry.is_behind(holder) else 0,
                waiting_s=now - holder.sent_s if entry.is_behind(holder) else 0.0,
            )
            for entry in self.running.values()
            for model, holder in entry.holders.items()
        ]

    def check_integrity(self) -> None:
        """Promises are to running holders and strays only, and within what exists; closed ids do not run."""
        assert len(self._tombstones) <= self._num_tombstones
        for seq, entry in self.running.items():
            assert seq == entry.seq, entry
            assert not self.is_closed(seq), entry
            assert 0 <= entry.start_len <= entry.committed_len, entry
            assert all(h.acked_len >= 0 and h.kv_len >= 0 for h in entry.holders.values()), entry
            for model, holder in entry.holders.items():
                replica = self.replicas.get(holder.replica_id)
                assert replica is None or not replica.up or seq in replica.reserved, (entry, replica)
                assert replica is None or replica.info.model == model, (entry, replica)
        for replica_id, replica in self.replicas.items():
            assert replica_id == replica.info.replica_id
            assert self._by_model[replica.info.model][replica_id] is replica, replica
            assert 0 <= replica.free_blocks <= replica.info.num_blocks, replica
            assert replica.up or not (replica.reserved or replica.strays), replica
            for seq in replica.reserved.keys() | replica.strays.keys():
                assert (seq in replica.strays) != (self.holder(seq, replica) is not None), (seq, replica)

    def of(self, model: str) -> Collection[Replica]:
        """All replicas of a model."""
        return self._by_model[model].values()

    def _reserve(self, replica: Replica, entry: Running) -> None:
        replica.reserved[entry.seq] = replica.blocks_for(entry.max_len) or replica.info.num_blocks
