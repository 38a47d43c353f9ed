"""Coordinator and simulated holders under random losses, repetitions, reorderings and restarts.

The model recomputes everything from the list of verdicts: a holder never has another token committed, and once messages
arrive again all of them have the same ones and nothing else.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstate.allocator import BlockAllocator
from kvstate.coordinator import CoordinatorCore, FromReplica, FromRouter, Outgoing
from kvstate.protocol import (
    Acked,
    Admit,
    Admitted,
    Close,
    Closed,
    Commit,
    Committed,
    Draft,
    Finish,
    Held,
    Key,
    Message,
    Need,
    Open,
    Profile,
    Register,
    ReplicaInfo,
    Report,
    Resume,
    Sampling,
)
from kvstate.sequence import SequenceState, accept_step, apply_commit, apply_open, evict

MODELS = ["drafter", "middle", "target"]
REPLICAS = {"d": "drafter", "m": "middle", "t1": "target", "t2": "target"}
BLOCK_TOKENS, NUM_BLOCKS, LEASE_S = 4, 24, 4.0
PICK = st.integers(0, 2**16)


@dataclass
class Holding:
    """A replica: real sequence states over a real allocator, without an engine."""

    info: ReplicaInfo
    up: bool = True
    states: dict[int, SequenceState] = field(default_factory=dict)
    allocator: BlockAllocator = field(default_factory=lambda: BlockAllocator(NUM_BLOCKS, BLOCK_TOKENS))

    def register(self) -> Register:
        return Register(self.info, tuple(Held(s.seq, s.committed_len, s.kv_len) for s in self.states.values()))

    def report(self, dropped: tuple[int, ...] = ()) -> Report:
        return Report(self.allocator.free_blocks, len(self.states), dropped)

    def receive(self, message: Message) -> FromReplica:
        if isinstance(message, Close):
            self.states.pop(message.seq, None)
            self.allocator.release(message.seq)
            return Closed(message.seq)
        assert isinstance(message, Commit)
        state = self.states.get(message.seq) or SequenceState(message.seq)
        acked = apply_commit(state, message)
        self.allocator.truncate(message.seq, state.kv_len)
        return acked

    def step(self, draft: Draft) -> Need | None:
        """Run a draft as an engine would: its tokens, all but the last computed, then as many as room allows."""
        state = self.states.get(draft.seq) or SequenceState(draft.seq)
        answer = accept_step(state, draft)
        if isinstance(answer, Need):
            return answer
        self.allocator.truncate(draft.seq, state.kv_len)
        if self.allocator.extend(draft.seq, len(state.tokens)):
            state.kv_len = max(state.kv_len, len(state.tokens) - 1)
        return None

    def wipe(self) -> None:
        for seq in list(self.states):
            self.receive(Close(seq))

    def check_integrity(self) -> None:
        self.allocator.check_integrity()
        for seq, state in self.states.items():
            state.check_integrity()
            assert len(self.allocator.blocks(seq)) >= self.allocator.blocks_for(state.kv_len)


class Cluster(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.replicas = {
            name: Holding(ReplicaInfo(name, model, "n", "h:1", "v", 64, BLOCK_TOKENS, NUM_BLOCKS, Profile(1.0)))
            for name, model in REPLICAS.items()
        }
        self.wires: dict[str, list[Message]] = {}  # in flight, per replica, both ways
        self.next_seq = 1
        self.asked: dict[int, Admit] = {}  # waiting for Admitted
        self.texts: dict[int, list[int]] = {}  # running: the truth
        self.admitted: dict[int, dict[str, str]] = {}
        self.epochs: dict[int, int] = {}
        self.num_steps = 0
        self.draining = False
        self.start_coordinator()
        for name in self.replicas:
            self.up_again(name)

    # ------------------------------------------------------------------------------------------------------- wiring

    def start_coordinator(self) -> None:
        self.core = CoordinatorCore(MODELS, max_waiting=3, lease_s=LEASE_S)
        self.wires = {name: [] for name in self.replicas}
        self.route(self.core.router_connected("router", self.now))

    def route(self, out: list[Outgoing]) -> None:
        for each in out:
            if each.to_kind == "replica":
                self.wires[each.to_id].append(each.message)
            elif isinstance(each.message, Admitted):
                self.on_admitted(each.message)

    def on_admitted(self, message: Admitted) -> None:
        admit = self.asked.pop(message.seq, None)
        assert admit is not None or message.seq in self.texts, message
        if admit is not None and message.refusal is None:
            assert message.holders.keys() >= {"target"}
            self.texts[message.seq] = [1000 * message.seq + i for i in range(admit.prompt_len)]
            self.admitted[message.seq] = message.holders
            self.epochs[message.seq] = 0
            if self.draining or message.seq % 2:  # the others are opened late, or never
                for name in message.holders.values():
                    self.reopen(message.seq, name)

    def send(self, message: FromRouter) -> None:
        self.route(self.core.on_router("router", message, self.now))

    def pump(self, name: str, message: Message) -> None:
        replica = self.replicas[name]
        if not replica.up:
            return
        if isinstance(message, Commit | Close):
            self.wires[name].append(replica.receive(message))
        else:
            assert isinstance(message, Acked | Closed)
            self.route(self.core.on_replica(name, message, self.now))

    def in_flight(self) -> list[tuple[str, int]]:
        return [(name, i) for name, wire in self.wires.items() for i in range(len(wire))]

    def up_again(self, name: str) -> None:
        self.replicas[name].up = True
        self.route(self.core.on_replica(name, self.replicas[name].register(), self.now))

    def resume_all(self, seqs: list[int]) -> None:
        for seq in seqs:
            tokens = tuple(self.texts[seq])
            self.send(Resume(seq, self.epochs[seq], tokens, 40, self.admitted[seq]))

    def reopen(self, seq: int, name: str) -> None:
        text, replica = self.texts[seq], self.replicas[name]
        apply_open(replica.states.setdefault(seq, SequenceState(seq)), Open(seq, tuple(text), 1, Sampling()))

    def some(self, pick: int, wanted: bool = True) -> int | None:
        running = sorted(self.texts)
        return running[pick % len(running)] if running and wanted else None

    # -------------------------------------------------------------------------------------------------------- rules

    @rule(name=st.sampled_from(sorted(REPLICAS)))
    def replica_arrives(self, name: str) -> None:
        """Also one that is up: its stream broke and came back before anybody noticed."""
        self.wires[name].clear()
        self.up_again(name)

    @rule(prompt_len=st.integers(1, 9), max_len=st.integers(10, 70), replaced=PICK, replace=st.booleans())
    def admit(self, prompt_len: int, max_len: int, replaced: int, replace: bool) -> None:
        old = self.some(replaced, replace)
        if old is not None:
            self.forget(old)
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self.asked[seq] = Admit(seq, prompt_len, max_len, old)
        self.send(self.asked[seq])

    @rule(pick=PICK, model=st.sampled_from(MODELS))
    def open(self, pick: int, model: str) -> None:
        seq = self.some(pick)
        name = self.admitted[seq].get(model) if seq is not None else None
        if seq is not None and name is not None and self.replicas[name].up:
            self.reopen(seq, name)

    @rule(pick=PICK, model=st.sampled_from(MODELS), guesses=st.lists(st.integers(0, 3), max_size=3), back=PICK)
    def step(self, pick: int, model: str, guesses: list[int], back: int) -> None:
        """A draft whose guesses may be right: the next verdicts are drawn from the same few tokens."""
        seq = self.some(pick)
        name = self.admitted[seq].get(model) if seq is not None else None
        if seq is None or name is None or not self.replicas[name].up:
            return
        text = self.texts[seq]
        from_len = back % (len(text) + 1)
        self.num_steps += 1
        key = Key(self.epochs[seq], self.num_steps)
        draft = Draft(seq, key, len(text), from_len, (*text[from_len:], *guesses), 1)
        need = self.replicas[name].step(draft)
        if need is not None and need.unknown:
            self.reopen(seq, name)
        elif need is not None:
            assert need.from_len < from_len

    @rule(pick=PICK, verdict=st.lists(st.integers(0, 3), min_size=1, max_size=4), twice=st.booleans())
    def commit(self, pick: int, verdict: list[int], twice: bool) -> None:
        seq = self.some(pick)
        if seq is None:
            return
        self.epochs[seq] += 1
        message = Committed(seq, self.epochs[seq], len(self.texts[seq]), tuple(verdict))
        self.texts[seq] += verdict
        for _ in range(1 + twice):
            self.send(message)

    def forget(self, seq: int) -> None:
        del self.texts[seq], self.admitted[seq], self.epochs[seq]

    @rule(pick=PICK)
    def finish(self, pick: int) -> None:
        seq = self.some(pick)
        if seq is not None:
            self.forget(seq)
            self.send(Finish(seq))

    @rule(pick=PICK)
    def withdraw(self, pick: int) -> None:
        if self.asked:
            seq = sorted(self.asked)[pick % len(self.asked)]
            del self.asked[seq]
            self.send(Finish(seq))

    @precondition(lambda self: self.in_flight())
    @rule(pick=PICK, fate=st.sampled_from(["arrives", "lost", "twice"]))
    def wire(self, pick: int, fate: str) -> None:
        """Any message in flight, not only the oldest."""
        flight = self.in_flight()
        name, index = flight[pick % len(flight)]
        message = self.wires[name][index] if fate == "twice" else self.wires[name].pop(index)
        if fate != "lost":
            self.pump(name, message)

    @rule(name=st.sampled_from(sorted(REPLICAS)), killed=st.booleans())
    def replica_lost(self, name: str, killed: bool) -> None:
        self.wires[name].clear()
        self.replicas[name].up = False
        if killed:
            self.replicas[name].wipe()
        self.route(self.core.replica_lost(name, self.now))
        for holders in self.admitted.values():  # the router, which is told, opens nothing there any more
            for model in [model for model, holder in holders.items() if holder == name]:
                del holders[model]

    @rule(name=st.sampled_from(sorted(REPLICAS)), pick=PICK, tokens_too=st.booleans())
    def evicted(self, name: str, pick: int, tokens_too: bool) -> None:
        replica, registered = self.replicas[name], self.core.ledger.is_up(name)
        if not (replica.up and registered and replica.states):
            return
        seq = sorted(replica.states)[pick % len(replica.states)]
        evict(replica.states[seq])
        replica.allocator.release(seq)
        if tokens_too:
            del replica.states[seq]
        self.route(self.core.on_replica(name, replica.report(dropped=(seq,)), self.now))

    @rule(order=st.permutations([*sorted(REPLICAS), "router"]))
    def coordinator_restarts(self, order: list[str]) -> None:
        self.start_coordinator()
        for who in order:
            if who == "router":
                self.resume_all(sorted(self.texts))
                for admit in list(self.asked.values()):
                    self.send(admit)
            elif self.replicas[who].up:
                self.up_again(who)

    @rule()
    def router_reconnects(self) -> None:
        self.asked.clear()
        self.route(self.core.router_lost("router", self.now))
        self.route(self.core.router_connected("router", self.now))
        self.resume_all(sorted(self.texts))

    @rule(after_s=st.sampled_from([0.01, 0.1, 1.0]))
    def tick(self, after_s: float) -> None:
        self.now += after_s
        for name, replica in self.replicas.items():
            if replica.up and self.core.ledger.is_up(name):
                self.route(self.core.on_replica(name, replica.report(), self.now))
        self.route(self.core.tick(self.now))

    # --------------------------------------------------------------------------------------------------- invariants

    @invariant()
    def nothing_contradicts_the_truth(self) -> None:
        self.core.check_integrity()
        assert self.core.num_waiting == len(self.asked)
        assert self.core.ledger.running.keys() == self.texts.keys()
        for seq, entry in self.core.ledger.running.items():
            assert self.texts[seq][entry.start_len :] == entry.tokens
        for replica in self.replicas.values():
            replica.check_integrity()
            for seq, state in replica.states.items():
                if seq in self.texts:
                    assert state.tokens[: state.committed_len] == self.texts[seq][: state.committed_len]

    def teardown(self) -> None:
        self.everyone_is_back()
        self.last_frames_are_lost()
        for _ in range(40):
            self.tick(0.25)
            while flight := self.in_flight():
                name, index = flight[0]
                self.pump(name, self.wires[name].pop(index))
        self.nothing_contradicts_the_truth()
        self.all_hold_the_truth()
        self.nobody_holds_anything_else()

    def everyone_is_back(self) -> None:
        """The router's next messages have reached every holder, now and whenever something is admitted."""
        self.draining = True
        for name, replica in self.replicas.items():
            if not (replica.up and self.core.ledger.is_up(name)):
                self.up_again(name)
        for seq, entry in self.core.ledger.running.items():
            for holder in entry.holders.values():
                self.reopen(seq, holder.replica_id)

    def last_frames_are_lost(self) -> None:
        """One more verdict, or the end, of every sequence reaches no holder; from then on nothing is lost."""
        for seq in sorted(self.texts):
            if seq % 3:
                self.commit(sorted(self.texts).index(seq), [1, 2], twice=False)
            else:
                self.finish(sorted(self.texts).index(seq))
        for wire in self.wires.values():
            wire.clear()

    def all_hold_the_truth(self) -> None:
        for seq, entry in self.core.ledger.running.items():
            assert self.core.converged(seq), entry
            for holder in entry.holders.values():
                state = self.replicas[holder.replica_id].states[seq]
                assert state.committed_len == len(self.texts[seq])
                assert not entry.tokens or holder.acked_len == state.committed_len
                assert state.tokens[: state.committed_len] == self.texts[seq]

    def nobody_holds_anything_else(self) -> None:
        running = self.core.ledger.running
        for name, replica in self.replicas.items():
            held = {seq for seq, entry in running.items() if name in entry.replica_ids().values()}
            assert replica.states.keys() == held
            assert self.core.ledger.replicas[name].reserved.keys() == held
            assert not self.core.ledger.replicas[name].strays


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
