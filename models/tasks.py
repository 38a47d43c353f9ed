"""One step message being served by an engine: which rows it computes, which it samples, and the reply it ends with.

Rows, for a sequence of L tokens (the last token never has KV yet):

    Draft(count)   rows kv_len … L−1, the last one sampled; then one row per further token
    Check(count)   rows up to L−1, the last count + 1 sampled
    Probe(count)   rows up to committed_len−2, the last count sampled

The nodes of a tree are no tokens of the sequence. Its check first computes what lacks up to row L−2; then row L−1 and
one for each node in a forward of their own (models/trees.py).
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from kvstate.protocol import Check, Draft, Drafted, Probe, Probed, Step, StepReply, Timing, Verdict, given_tokens
from kvstate.sequence import SequenceState
from models.backend import GuessSink, LogprobSink, Move, TopSink
from models.trees import Layout, Tree


@dataclass(slots=True)
class Task:
    """`next_sample` is the next row that gives a sample, `rows_end` where the rows of this pass end."""

    sender: object
    step: Step
    state: SequenceState
    arrived_s: float
    next_sample: int
    rows_end: int
    samples: list[int | None] = field(default_factory=list)
    logprobs: LogprobSink | None = None
    tops: TopSink | None = None
    guesses: GuessSink | None = None
    layout: Layout | None = None
    batches: int = 0
    rows: int = 0
    sequences: int = 0
    busy_s: float = 0.0
    queue_s: float = 0.0

    @property
    def start(self) -> int:
        """First row still to compute: KV already there is used, but a row that samples is computed again."""
        return min(self.state.kv_len, self.next_sample)

    @property
    def tree(self) -> Tree | None:
        """The tree that is checked, once only its own rows are left to compute."""
        step = self.step
        if not isinstance(step, Check) or not step.parents or self.start < self.rows_end:
            return None
        return Tree(step.tokens[-step.count :], step.parents)

    @property
    def is_short(self) -> bool:
        """Whether it computes little more than it samples, as opposed to a prefill or a long catch-up."""
        return self.rows_end - self.start <= self.step.count + 4

    def took_part(self, rows: int, sequences: int, busy_s: float) -> None:
        """Account for a batch of `rows` rows of `sequences` sequences in which this task had its share."""
        self.batches += 1
        self.rows += rows
        self.sequences += sequences
        self.busy_s += busy_s

    def take(self, end: int, samples: list[int | None]) -> None:
        """Rows up to `end` are computed; `samples` came from the last of them."""
        self.state.kv_len = max(self.state.kv_len, end)
        self.samples.extend(samples)
        self.next_sample += len(samples)

    def timing(self) -> Timing:
        return Timing(self.batches, self.rows, self.sequences, self.busy_s, self.queue_s)


def start_task(sender: object, step: Step, state: SequenceState, now_s: float) -> Task:
    """The task of a step that `accept_step` found ready."""
    num_tokens, sink = len(state.tokens), None
    match step:
        case Draft(count=0):
            next_sample = rows_end = num_tokens
        case Draft():
            next_sample, rows_end = num_tokens - 1, num_tokens
        case Check(parents=parents) if parents:
            next_sample = rows_end = num_tokens - 1
        case Check(count=count, logprobs=num_top):
            next_sample, rows_end = num_tokens - 1 - count, num_tokens
            sink = LogprobSink(num_top) if num_top >= 0 else None
        case Probe(count=count, committed_len=committed_len):
            next_sample, rows_end = committed_len - 1 - count, committed_len - 1
    assert next_sample >= 0, step
    num_likeliest = 0 if isinstance(step, Draft) else step.num_top
    tops = TopSink(num_likeliest) if num_likeliest > 0 else None
    guesses = GuessSink(step.num_guesses) if isinstance(step, Draft) and step.num_guesses > 0 else None
    return Task(sender, step, state, now_s, next_sample, rows_end, logprobs=sink, tops=tops, guesses=guesses)


def is_overtaken(task: Task) -> bool:
    """Whether commits since its start replaced the tail it works on, or reach past where it would draft or check.

    Finishing it then would put its token into text that is committed. Probes and prefills only look at their tokens.
    """
    step, state = task.step, task.state
    if isinstance(step, Probe) or (isinstance(step, Draft) and step.count == 0):
        return task.rows_end > len(state.tokens)
    if isinstance(step, Check) and step.parents:  # no tail of tokens shows it: what the tree follows is all there is
        return state.tokens[step.from_len :] != [*given_tokens(step)]
    first = step.from_len + len(step.tokens) - (step.count if isinstance(step, Check) else 0)
    return state.committed_len > first or task.rows_end != len(state.tokens)


def continue_draft(task: Task, end_ids: AbstractSet[int], context_len: int) -> bool:
    """After all rows of a pass: append a drafted token and prepare the next one. False when the task is done.

    A draft ends early where the model has no guess, after a token that ends the text, and at the end of the context.
    """
    if not isinstance(task.step, Draft) or task.step.count == 0:
        return False
    state, token = task.state, task.samples[-1]
    if token is None:
        return False
    state.tokens.append(token)
    ends = token in end_ids or len(state.tokens) >= context_len or len(task.samples) == task.step.count
    task.next_sample, task.rows_end = len(state.tokens) - 1, len(state.tokens)
    return not ends


def finish(task: Task) -> tuple[StepReply, int]:
    """The reply of a task whose rows are all computed, and the rows of KV that its rejected tokens cost."""
    state, step = task.state, task.step
    match step:
        case Check():
            return _verdict(task, step)
        case Draft():
            drafted = tuple(t for t in task.samples if t is not None)
            lengths, guesses = (state.committed_len, state.kv_len), () if task.guesses is None else task.guesses.rows
            return Drafted(state.seq, step.key, drafted, *lengths, task.timing(), tuple(guesses)), 0
        case Probe(committed_len=committed_len, count=count):
            lengths, samples = (state.committed_len, state.kv_len), tuple(task.samples)
            tops = () if task.tops is None else tuple(task.tops.rows)
            return Probed(state.seq, step.key, committed_len - count, samples, *lengths, task.timing(), tops), 0


def finish_tree(task: Task, by_slice: Sequence[Sequence[int | None]]) -> tuple[Verdict, list[Move]]:
    """The reply after the forward of a tree, and the KV to be moved: then the sequence is as after any check."""
    state, step, layout = task.state, task.step, task.layout
    assert layout is not None
    after = layout.samples(by_slice)
    path = layout.tree.accepted(after)
    own_token = after[path[-1] if path else -1]
    state.tokens += [*(layout.tree.tokens[node] for node in path), own_token]
    state.kv_len = len(state.tokens) - 1
    logprobs, tops = layout.stated(path)
    lengths = (state.committed_len, state.kv_len)
    reply = Verdict(state.seq, step.key, len(path), own_token, *lengths, task.timing(), logprobs, tops, tuple(path))
    return reply, layout.compaction(path)


def _verdict(task: Task, step: Check) -> tuple[Verdict, int]:
    """Verification is equality: accept drafted tokens while they equal own samples, then add the own token."""
    state = task.state
    first = len(state.tokens) - step.count
    num_accepted = next((i for i in range(step.count) if state.tokens[first + i] != task.samples[i]), step.count)
    own_token = task.samples[num_accepted]
    assert own_token is not None, "a verifier always has a sample"
    kept = first + num_accepted
    dropped = max(0, state.kv_len - kept)
    state.kv_len -= dropped
    state.tokens[kept:] = [own_token]
    lengths = (state.committed_len, state.kv_len)
    logprobs = () if task.logprobs is None else tuple(task.logprobs.rows[: num_accepted + 1])
    tops = () if task.tops is None else tuple(task.tops.rows[: num_accepted + 1])
    return Verdict(state.seq, step.key, num_accepted, own_token, *lengths, task.timing(), logprobs, tops), dropped
