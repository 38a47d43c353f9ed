"""The engine of one replica: every forward takes whatever sequences are ready, up to a budget of rows.

`submit` may be called from any thread; everything else runs on the engine's own thread (`run`), so sequences, blocks
and model are touched by that thread alone. Messages are applied between two forwards, in the order they came.
It knows neither sockets nor event loops: replies go to a `deliver` callable, once per step.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstate.allocator import BlockAllocator, prefix_keys
from kvstate.protocol import (
    Acked,
    AnyMessage,
    Check,
    Close,
    Closed,
    Commit,
    Draft,
    Held,
    Message,
    Need,
    Open,
    Probe,
    Profile,
    ReplicaCounts,
    Report,
    Sampling,
    Step,
    StepReply,
)
from kvstate.sequence import InvariantError, Ready, SequenceState, Stale, accept_step, apply_commit, apply_open, evict
from models.backend import Backend, Slice
from models.gathering import Gathering
from models.tasks import Task, continue_draft, finish, finish_tree, is_overtaken, start_task
from models.trees import Known, Tree, lay_out

log = logging.getLogger(__name__)

MOST_INBOX = 100_000

Batch = Sequence[tuple["Task", Sequence[Slice]]]
"""Tasks of a forward, each with its rows; a tree's are in several slices."""

Sender = object
Deliver = Callable[[Sequence[tuple[Sender, AnyMessage]]], None]


@dataclass(slots=True)
class Holding:
    """One sequence on this replica; `heard_s` is when a message last named it.

    first        where the model reads the sequence from: behind the beginning of a prompt that is long for a drafter
    prompt_keys  of the prompt's blocks in the prefix cache. Its last token is left out: every sequence computes one row
                 at least, and no step samples at an earlier one, so nobody writes into a shared block.
    """

    state: SequenceState
    heard_s: float
    first: int = 0
    prompt_keys: Sequence[bytes] = ()
    published: bool = False


@dataclass(slots=True)
class EngineStats:
    """Counts since the start; an exporter turns them into metrics."""

    forwards: int = 0
    rows: int = 0
    most_sequences_in_forward: int = 0
    rolled_back_tokens: int = 0
    stale_messages: int = 0
    resent_prefixes: int = 0
    expired_sequences: int = 0
    cached_tokens: int = 0
    evicted_sequences: int = 0


@dataclass(frozen=True, slots=True)
class Forward:
    """One that was computed and not yet told of: its tasks, their samples, and the seconds that it took."""

    batch: Batch
    samples: list[list[list[int | None]]]
    busy_s: float

    @property
    def rows(self) -> int:
        return sum(s.end - s.start for _, slices in self.batch for s in slices)

    @property
    def sequences(self) -> int:
        return len(self.batch)


class InboxFull(Exception):
    """More messages wait than the engine will ever catch up with."""


class UnknownMessage(Exception):
    """No engine serves messages of this type."""


class UnreadPosition(InvariantError):
    """A step asks for a sample within the part of a prompt that this drafter does not read."""


class UnfitTree(InvariantError):
    """A tree with more rows than a forward may have, or for a drafter that does not read the whole prompt."""


class Engine:
    """Serves the sequences of one replica over one backend.

    max_rows       of one forward
    lease_s        how long a sequence that no message names is held
    prompt_tokens  how much of a prompt's end the model reads; all of it where None
    """

    def __init__(
        self,
        backend: Backend,
        deliver: Deliver,
        *,
        max_rows: int = 256,
        lease_s: float = 30.0,
        prefix_cache: bool = True,
        prompt_tokens: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._backend = backend
        self._deliver = deliver
        self._max_rows = max_rows
        self._lease_s = lease_s
        self._prefix_cache = prefix_cache
        self._prompt_tokens = prompt_tokens
        self._clock = clock
        self._inbox: deque[tuple[Sender, Message, float]] = deque()
        self._arrived_s = 0.0  # when the message being handled came: it may have waited for a forward to end
        self._controls: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._holdings: dict[int, Holding] = {}
        self._blocks = BlockAllocator(backend.num_blocks, backend.block_tokens)
        self._tasks: list[Task] = []
        self._replies: list[tuple[Sender, AnyMessage]] = []
        self._dropped: list[int] = []
        self._gathering = Gathering()
        self._handlers: dict[type, Callable[[Sender, Message], None]] = {
            Open: self._on_open,
            Commit: self._on_commit,
            Close: self._on_close,
            Draft: self._on_step,
            Check: self._on_step,
            Probe: self._on_step,
        }
        self.stats = EngineStats()

    # ------------------------------------------------------------------------------------------------- other threads

    def submit(self, sender: Sender, messages: Iterable[Message]) -> None:
        """Queue messages; their replies come back through `deliver` with the same sender.

        Raises InboxFull, and UnknownMessage for a type that engines do not serve; the sender is at fault.
        """
        for message in messages:
            if type(message) not in self._handlers:
                raise UnknownMessage(type(message).__name__)
            if len(self._inbox) >= MOST_INBOX:
                raise InboxFull(len(self._inbox))
            self._inbox.append((sender, message, self._clock()))
        self._wake.set()

    def control(self, action: Callable[[], None]) -> None:
        """Run `action` on the engine's thread between two forwards (live changes of a backend, reports)."""
        self._controls.append(action)
        self._wake.set()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    # ------------------------------------------------------------------------------------------------- engine thread

    def run(self) -> None:
        """Work until `stop`; sleeps while there is nothing to do, but looks after leases each second."""
        while not self._stopping:
            if not self.step():
                self._wake.wait(timeout=1.0)
            self._wake.clear()
            self._gather()

    def step(self) -> bool:
        """Apply what came, run one forward, report. False when no task was ready."""
        forward = self.begin()
        if forward is not None:
            self.end(forward, forward.busy_s)
        return forward is not None

    def begin(self) -> Forward | None:
        """Apply what came and compute a forward. None when no task was ready."""
        self._receive()
        batch = self._schedule()
        if batch:
            return Forward(batch, *self._forward(batch))
        self._report()
        return None

    def end(self, forward: Forward, busy_s: float) -> None:
        """Tell of a forward that took `busy_s`."""
        self._advance(forward, busy_s)
        self._report()

    def gathers_for_s(self) -> float:
        """How much longer the next forward should wait (models/gathering.py); 0 or less: not at all."""
        self._receive()
        return self._gathering.left_s(self._clock()) if self._tasks else 0.0

    def assume(self, profile: Profile) -> None:
        """What `profile` would find."""
        self._gathering.base_s = profile.base_ms / 1e3

    def _gather(self) -> None:
        """Wait while the next forward would gain by it (models/gathering.py); messages are applied as they come."""
        while (left_s := self.gathers_for_s()) > 0.0 and not self._stopping:
            self._wake.wait(left_s)
            self._wake.clear()

    def profile(self) -> Profile:
        """Time batches of 1 and 9 rows and of 4 sequences, to start the router's latency fit. Keeps nothing."""
        self._time_batch(1, 1)
        one, nine, four = (min(self._time_batch(*shape) for _ in range(3)) for shape in ((1, 1), (1, 9), (4, 1)))
        per_token_ms = max(0.0, (nine - one) / 8)
        per_sequence_ms = max(0.0, (four - one) / 3 - per_token_ms)
        profile = Profile(max(0.001, one - per_token_ms - per_sequence_ms), per_token_ms, per_sequence_ms)
        self.assume(profile)
        return profile

    def held(self) -> tuple[Held, ...]:
        return tuple(Held(s, h.state.committed_len, h.state.kv_len) for s, h in self._holdings.items())

    def report(self) -> Report:
        """The heartbeat of this replica; names the sequences it dropped to length 0 since the last one."""
        dropped, self._dropped = tuple(self._dropped), []
        stats = self.stats
        counts = ReplicaCounts(stats.rolled_back_tokens, stats.stale_messages, stats.resent_prefixes)
        return Report(self._blocks.free_blocks, len(self._holdings), dropped, counts)

    # ------------------------------------------------------------------------------------------------------ messages

    def _receive(self) -> None:
        while self._controls:
            self._controls.popleft()()
        while self._inbox:
            sender, message, self._arrived_s = self._inbox.popleft()
            if isinstance(message, Draft | Check):
                self._gathering.returned(message.seq, self._arrived_s)
            try:
                self._handlers[type(message)](sender, message)
            except InvariantError as error:  # one sequence is at fault: it is dropped, and rebuilt by its router
                log.warning("dropping sequence %d: %s", error.seq, error)
                self._forget(error.seq)
                self._dropped.append(error.seq)
        self._expire()

    def _on_open(self, sender: Sender, message: Message) -> None:
        assert isinstance(message, Open)
        holding = self._holdings.get(message.seq)
        if holding is None:
            prompt, first = message.tokens[: message.prompt_len - 1], self._first_read(message.prompt_len)
            shares = self._prefix_cache and first == 0
            keys = prefix_keys(prompt, self._blocks.block_tokens) if shares else ()
            holding = Holding(SequenceState(message.seq), self._clock(), first, keys)
            self._holdings[message.seq] = holding
        holding.heard_s = self._clock()
        self._replies.append((sender, apply_open(holding.state, message)))

    def _first_read(self, prompt_len: int) -> int:
        return max(0, prompt_len - self._prompt_tokens) if self._prompt_tokens is not None else 0

    def _on_commit(self, sender: Sender, message: Message) -> None:
        assert isinstance(message, Commit)
        holding = self._holdings.get(message.seq)
        if holding is None:
            self._replies.append((sender, Acked(message.seq, 0, 0, unknown=True)))
            return
        holding.heard_s = self._clock()
        kv_len = holding.state.kv_len
        self._replies.append((sender, apply_commit(holding.state, message)))
        self._rolled_back(holding.state, kv_len - holding.state.kv_len)
        self._drop_overtaken(holding.state)

    def _on_close(self, sender: Sender, message: Message) -> None:
        assert isinstance(message, Close)
        self._publish_text(message.seq)
        self._forget(message.seq)
        self._replies.append((sender, Closed(message.seq)))

    def _on_step(self, sender: Sender, message: Message) -> None:
        assert isinstance(message, Draft | Check | Probe)
        holding = self._holdings.get(message.seq)
        if holding is None:
            self.stats.resent_prefixes += 1
            self._replies.append((sender, Need(message.seq, message.key, 0, unknown=True)))
            return
        holding.heard_s = self._clock()
        match accept_step(holding.state, message):
            case Need() as need:
                self.stats.resent_prefixes += 1
                self._replies.append((sender, need))
            case Stale(need):
                self.stats.stale_messages += 1
                if need is not None:
                    self._replies.append((sender, need))
            case Ready(rolled_back):
                self._rolled_back(holding.state, rolled_back)
                self._begin(holding)
                self._add_task(sender, message, holding)

    def _add_task(self, sender: Sender, step: Step, holding: Holding) -> None:
        state = holding.state
        task = start_task(sender, step, state, self._arrived_s)
        if task.next_sample < holding.first:
            raise UnreadPosition(state.seq, task.next_sample, holding.first)
        num_nodes = len(step.parents) if isinstance(step, Check) else 0
        if num_nodes > 0 and (num_nodes >= self._max_rows or holding.first > 0):
            raise UnfitTree(state.seq, num_nodes, self._max_rows, holding.first)
        if isinstance(step, Probe):
            self._drop_overtaken(state)
        else:  # the router no longer waits for an older step of this sequence
            self._tasks = [t for t in self._tasks if t.state is not state or isinstance(t.step, Probe)]
        self._tasks.append(task)

    def _begin(self, holding: Holding) -> None:
        """Where the model reads from, or with what the prefix cache has of the prompt."""
        state = holding.state
        state.kv_len = max(state.kv_len, holding.first)
        if state.kv_len == 0 and holding.prompt_keys and not self._blocks.blocks(state.seq):
            state.kv_len = self._blocks.adopt(state.seq, holding.prompt_keys) * self._blocks.block_tokens
            self.stats.cached_tokens += state.kv_len

    def _publish_prompt(self, holding: Holding) -> None:
        """Once its KV is computed, for sequences that start beside this one."""
        if not holding.published and holding.state.kv_len >= len(holding.prompt_keys) * self._blocks.block_tokens:
            self._blocks.publish(holding.state.seq, holding.prompt_keys)
            holding.published = True

    def _publish_text(self, seq: int) -> None:
        """All committed blocks of a sequence that ends well: a conversation may go on with them."""
        holding = self._holdings.get(seq)
        if self._prefix_cache and holding is not None and holding.first == 0 and self._blocks.blocks(seq):
            state = holding.state
            known = state.tokens[: min(state.kv_len, state.committed_len)]
            self._blocks.publish(seq, prefix_keys(known, self._blocks.block_tokens))

    def _forget(self, seq: int) -> None:
        self._gathering.forget(seq)
        holding = self._holdings.pop(seq, None)
        if holding is not None:
            self._tasks = [t for t in self._tasks if t.state is not holding.state]
            self._blocks.release(seq)

    def _expire(self) -> None:
        """Leases: a sequence that no message named for `lease_s` is dropped, so nothing leaks when a process dies.

        While a step of it is being served nobody needs to name it: its router waits for the reply.
        """
        now_s = self._clock()
        for task in self._tasks:
            self._holdings[task.state.seq].heard_s = now_s
        for seq in [s for s, h in self._holdings.items() if h.heard_s < now_s - self._lease_s]:
            self._forget(seq)
            self.stats.expired_sequences += 1

    def _rolled_back(self, state: SequenceState, num_rows: int) -> None:
        if num_rows > 0:
            self.stats.rolled_back_tokens += num_rows
            self._blocks.truncate(state.seq, max(0, state.kv_len - self._holdings[state.seq].first))

    def _drop_overtaken(self, state: SequenceState) -> None:
        """What was committed past a task, by a commit or a probe, changed or already covers what it works on."""
        overtaken = [t for t in self._tasks if t.state is state and is_overtaken(t)]
        for task in overtaken:
            self._tasks.remove(task)
            self._replies.append((task.sender, Need(state.seq, task.step.key, state.committed_len)))

    # ------------------------------------------------------------------------------------------------------ a forward

    def _schedule(self) -> Batch:
        """Tasks of this forward: short ones first, so that a prefill never delays them; one per sequence."""
        budget, chosen, sequences = self._max_rows, list[tuple[Task, Sequence[Slice]]](), set[int]()
        for task in sorted(self._tasks, key=lambda t: not t.is_short):
            seq, tree = task.state.seq, task.tree
            end = min(task.rows_end, task.start + budget) if tree is None else task.start + 1 + tree.depth
            if budget == 0 or seq in sequences or (tree is not None and 1 + len(tree.tokens) > budget):
                continue
            if not self._make_room(seq, end - self._holdings[seq].first, sequences):
                if not sequences:
                    self._give_up(task)
                continue
            sequences.add(seq)
            chosen.append((task, [self._slice(task, end)] if tree is None else self._slices_of(task, tree)))
            budget -= sum(s.end - s.start for s in chosen[-1][1])
        return chosen

    def _slices_of(self, task: Task, tree: Tree) -> Sequence[Slice]:
        """Of a forward that checks a tree. Its branches have blocks of their own meanwhile, as far as some are free."""
        state, step, scratch = task.state, task.step, _scratch_of(task.state.seq)
        assert isinstance(step, Check) and state.sampling is not None  # noqa: PT018 - types

        def take_blocks(count: int) -> Sequence[int] | None:
            num_before = len(self._blocks.blocks(scratch))
            if not self._blocks.extend(scratch, (num_before + count) * self._blocks.block_tokens):
                return None
            return self._blocks.blocks(scratch)[num_before:]

        known = Known(state.tokens, state.prompt_len, state.sampling, self._blocks.blocks(state.seq))
        task.layout = lay_out(tree, known, self._blocks.block_tokens, take_blocks, step.logprobs, step.num_top)
        return task.layout.slices

    def _slice(self, task: Task, end: int) -> Slice:
        state, first = task.state, self._holdings[task.state.seq].first
        assert state.sampling is not None, "a step is served only for a sequence that was opened"
        span, blocks = (task.start, end, min(end, task.next_sample)), self._blocks.blocks(state.seq)
        stop_below = 0.0 if isinstance(task.step, Check) else task.step.stop_below
        known = (state.prompt_len, blocks, state.sampling)
        return Slice(state.tokens, *span, *known, task.logprobs, stop_below, first, task.tops, task.guesses)

    def _make_room(self, seq: int, num_tokens: int, in_batch: set[int]) -> bool:
        """Blocks for `num_tokens` positions, taken from sequences outside the batch if need be.

        False: wait until those in the batch are done; with none in it, the replica is too small for this sequence.
        """
        while not self._blocks.extend(seq, num_tokens):
            others = (h for s, h in self._holdings.items() if s != seq and s not in in_batch and self._blocks.blocks(s))
            victim = min(others, key=lambda h: h.heard_s, default=None)
            if victim is None:
                return False
            self.evict(victim.state.seq)
        return True

    def evict(self, seq: int) -> None:
        """On the engine's thread: give up the KV of a sequence that is in no batch; its next step computes it again."""
        state = self._holdings[seq].state
        self._rolled_back(state, evict(state))
        state.kv_len = self._holdings[seq].first
        self._dropped.append(seq)
        self.stats.evicted_sequences += 1

    def _give_up(self, task: Task) -> None:
        """Drop a sequence that alone needs more blocks than there are; its router takes this replica for lost."""
        seq = task.state.seq
        log.warning("sequence %d needs %d positions, more than fit here: dropped", seq, task.rows_end)
        self._forget(seq)
        self._dropped.append(seq)
        self._replies.append((task.sender, Need(seq, task.step.key, 0, unknown=True)))

    def _forward(self, batch: Batch) -> tuple[list[list[list[int | None]]], float]:
        """Samples by task and slice, and the seconds that they took."""
        started_s = self._clock()
        self._backend.move([move for task, _ in batch if task.layout is not None for move in task.layout.moves])
        computing = [s for _, slices in batch for s in slices if s.end > s.start]
        results = iter(self._backend.forward(computing) if computing else [])
        samples = [[next(results) if s.end > s.start else [] for s in slices] for _, slices in batch]
        self.stats.forwards += bool(computing)
        self.stats.rows += sum(s.end - s.start for s in computing)
        num_sequences = sum(not s.is_branch for s in computing)
        self.stats.most_sequences_in_forward = max(self.stats.most_sequences_in_forward, num_sequences)
        return samples, self._clock() - started_s

    def _advance(self, forward: Forward, busy_s: float) -> None:
        rows, answered = forward.rows, list[int]()
        for (task, slices), sampled in zip(forward.batch, forward.samples, strict=True):
            task.took_part(rows, forward.sequences, busy_s)
            if task.layout is None:
                task.take(slices[0].end, sampled[0])
            self._publish_prompt(self._holdings[task.state.seq])
            if self._has_more_rows(task, slices):
                continue
            self._tasks.remove(task)
            self._holdings[task.state.seq].heard_s = now_s = self._clock()
            task.queue_s = max(0.0, now_s - task.arrived_s - task.busy_s)
            self._replies.append((task.sender, self._reply(task, sampled)))
            answered.append(task.state.seq)
        self._gathering.answered(answered, self._clock())

    def _has_more_rows(self, task: Task, slices: Sequence[Slice]) -> bool:
        if task.layout is not None:
            return False
        if slices[0].end < task.rows_end or (isinstance(task.step, Check) and task.step.parents):
            return True
        return continue_draft(task, self._backend.end_ids, self._backend.context_len)

    def _reply(self, task: Task, samples: Sequence[Sequence[int | None]]) -> StepReply:
        if task.layout is None:
            reply, dropped = finish(task)
            self._rolled_back(task.state, dropped)
            return reply
        verdict, moves = finish_tree(task, samples)
        self._backend.move(moves)
        self._blocks.release(_scratch_of(task.state.seq))
        self._blocks.truncate(task.state.seq, len(task.state.tokens))
        self.stats.rolled_back_tokens += task.layout.num_rows - 1 - verdict.num_accepted
        return verdict

    def _report(self) -> None:
        if self._replies:
            replies, self._replies = self._replies, []
            self._deliver(replies)

    def _time_batch(self, num_sequences: int, num_rows: int) -> float:
        """Milliseconds of one forward over scratch sequences; their blocks are released again."""
        seqs = range(-num_sequences, 0)
        assert all(self._blocks.extend(seq, num_rows) for seq in seqs), "the KV room is too small to profile"
        tokens = [0] * num_rows
        slices = [
            Slice(tokens, 0, num_rows, num_rows - 1, num_rows, self._blocks.blocks(seq), Sampling()) for seq in seqs
        ]
        started_s = self._clock()
        self._backend.forward(slices)
        elapsed_ms = (self._clock() - started_s) * 1e3
        for seq in seqs:
            self._blocks.release(seq)
        return elapsed_ms


def _scratch_of(seq: int) -> int:
    """A name for blocks that a sequence has during one forward only; sequences' own are not negative."""
    return -1 - seq
