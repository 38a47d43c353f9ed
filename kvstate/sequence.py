"""What a holder knows of one sequence, and the one rule that brings it in line with a message.

Token positions of a sequence (half-open; each length is at most the next, except that `kv_len` may lie anywhere below
`len(tokens)`):

    [0, committed_len)            permanent: the target's verdicts
    [committed_len, len(tokens))  droppable: drafts of inner levels, cut or replaced by any later step
    [0, kv_len)                   rows of KV computed; the caller keeps its blocks in step by truncating to `kv_len`

Pure: knows neither blocks nor tensors, and never runs a model. Every function here changes the state it is given, costs
O(len(message.tokens) + tokens dropped) and leaves the state untouched when it raises.

    InvariantError
    ├── ConflictingCommit   two messages disagree about a permanent position
    └── MalformedStep       a step whose tokens end below the committed_len it states, or whose tree is none
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstate.protocol import Acked, Check, Commit, Draft, Key, Need, Open, Opened, Probe, Sampling, Step, given_tokens


class InvariantError(Exception):
    """Something that can only follow from a fault in router, coordinator or holder."""

    def __init__(self, seq: int, *details: object) -> None:
        super().__init__(seq, *details)
        self.seq = seq


class ConflictingCommit(InvariantError):
    """A message states another token at a position that is permanent."""

    def __init__(self, seq: int, position: int, known: int, given: int) -> None:
        super().__init__(seq, position, known, given)
        self.position, self.known, self.given = position, known, given

    def __str__(self) -> str:
        return f"sequence {self.seq}: position {self.position} is committed as {self.known}, not {self.given}"


class MalformedStep(InvariantError):
    """A step says that more positions are committed, or to be sampled, than it and its prefix have tokens for."""

    def __init__(self, seq: int, end: int, committed_len: int, count: int) -> None:
        super().__init__(seq, end, committed_len, count)
        self.end, self.committed_len, self.count = end, committed_len, count

    def __str__(self) -> str:
        stated = f"committed length {self.committed_len} and count {self.count}"
        return f"sequence {self.seq}: tokens that end at {self.end} do not go with {stated}"


@dataclass(slots=True)
class SequenceState:
    """One sequence on one holder. `sampling` is None until it was opened; `last_key` until a step was accepted.

    Tokens at positions below `prompt_len` are the prompt.
    """

    seq: int
    tokens: list[int] = field(default_factory=list)
    committed_len: int = 0
    kv_len: int = 0
    last_key: Key | None = None
    sampling: Sampling | None = None
    prompt_len: int = 0

    def check_integrity(self) -> None:
        assert 0 <= self.committed_len <= len(self.tokens), self
        assert 0 <= self.kv_len <= len(self.tokens), self


@dataclass(frozen=True, slots=True)
class Ready:
    """The step can run: `state.tokens` holds its tokens. `rolled_back` rows of KV were dropped."""

    rolled_back: int


@dataclass(frozen=True, slots=True)
class Stale:
    """Not to be run: overtaken by a later step, then nobody waits for an answer; or by commits, then who still waits (a
    drafter may be ahead of a round that ended) is answered with `need`.
    """

    need: Need | None = None


def reconcile(state: SequenceState, from_len: int, tokens: Sequence[int]) -> int:
    """Make the sequence equal to `state.tokens[:from_len] + tokens`; return how many rows of KV that dropped.

    Keeps the longest common prefix, so it is idempotent. Droppable tokens past the end are cut; permanent ones stay.
    Raises ConflictingCommit if `tokens` differ at a permanent position. `from_len` must not exceed the known tokens.
    """
    assert 0 <= from_len <= len(state.tokens), (from_len, len(state.tokens))
    same = _first_difference(state, from_len, tokens)
    if same is not None and same < state.committed_len:
        raise ConflictingCommit(state.seq, same, state.tokens[same], tokens[same - from_len])
    end = from_len + len(tokens)
    kept = min(end, len(state.tokens)) if same is None else same
    return _replace_tail(state, max(kept, state.committed_len), tokens[kept - from_len :])


def accept_step(state: SequenceState, step: Step) -> Ready | Need | Stale:
    """Bring the sequence in line with a draft, check or probe, and say whether it can run.

    Ready  its tokens are known, `committed_len` and `last_key` are raised.
    Need   tokens are missing; nothing changed. The resend comes with a higher key.
    Stale  its key is not above the last one; or commits that came past it (by the coordinator) overtook it: they hold
           another token at one of its droppable positions, or already reach beyond where it would draft or check.

    Probes, and drafts of 0 tokens (prefill), only look at their tokens: what follows matching ones stays.
    """
    if state.last_key is not None and step.key <= state.last_key:
        return Stale()
    if state.sampling is None:
        return Need(step.seq, step.key, 0, unknown=True)
    if step.from_len > state.committed_len:
        return Need(step.seq, step.key, state.committed_len)
    tokens = given_tokens(step)
    end = step.from_len + len(tokens)
    if end < step.committed_len or not _has_rows(step, end):
        raise MalformedStep(step.seq, end, step.committed_len, step.count)
    only_looks = isinstance(step, Probe) or (isinstance(step, Draft) and step.count == 0)
    if _is_overtaken(state, step, end, only_looks):
        state.last_key = step.key
        return Stale(Need(step.seq, step.key, state.committed_len))
    rolled_back = (_absorb if only_looks else reconcile)(state, step.from_len, tokens)
    state.committed_len = max(state.committed_len, step.committed_len)
    state.last_key = step.key
    return Ready(rolled_back)


def apply_commit(state: SequenceState, commit: Commit) -> Acked:
    """Raise `committed_len` to the commit's end and acknowledge the lengths known then; runs no model.

    Droppable tokens that match become permanent with their KV; from the first that differs on they are replaced. A
    commit that starts past `committed_len` changes nothing, so that the sender sees from where to resend; one for a
    sequence never opened is acknowledged as unknown.
    """
    if state.sampling is None:
        return Acked(state.seq, 0, 0, unknown=True)
    if commit.from_len <= state.committed_len:
        _commit(state, commit.from_len, commit.tokens)
    return Acked(state.seq, state.committed_len, state.kv_len)


def apply_open(state: SequenceState, message: Open) -> Opened:
    """Learn how to sample, and the committed tokens so far. Idempotent; computes nothing."""
    _commit(state, 0, message.tokens)
    state.sampling, state.prompt_len = message.sampling, message.prompt_len
    return Opened(state.seq, state.committed_len, state.kv_len)


def evict(state: SequenceState) -> int:
    """Give up the KV, keep the tokens: the next step computes it again. Returns the rows dropped."""
    dropped, state.kv_len = state.kv_len, 0
    return dropped


def _commit(state: SequenceState, from_len: int, tokens: Sequence[int]) -> None:
    _absorb(state, from_len, tokens)
    state.committed_len = max(state.committed_len, from_len + len(tokens))


def _absorb(state: SequenceState, from_len: int, tokens: Sequence[int]) -> int:
    """As `reconcile`, but tokens known past the end stay when all before them match."""
    end = from_len + len(tokens)
    if end <= len(state.tokens) and _first_difference(state, from_len, tokens) is None:
        return 0
    return reconcile(state, from_len, tokens)


def _has_rows(step: Step, end: int) -> bool:
    """Whether each sample the step asks for has a row; a probe's tokens are all committed."""
    match step:
        case Draft():
            return step.count >= 0 and end >= 1
        case Check(parents=()):
            return 0 <= step.count < end
        case Check():
            return end >= 1 and step.count == len(step.parents) and is_tree(step.tokens[-step.count :], step.parents)
        case Probe():
            return 0 <= step.count < step.committed_len == end


def is_tree(tokens: Sequence[int], parents: Sequence[int]) -> bool:
    """Whether each of `tokens` follows one before it, or none of them, and no two that are equal follow the same."""
    in_order = all(-1 <= parent < node for node, parent in enumerate(parents))
    return len(tokens) == len(parents) == len(set(zip(parents, tokens, strict=False))) and in_order


def _is_overtaken(state: SequenceState, step: Draft | Check | Probe, end: int, only_looks: bool) -> bool:
    if not only_looks and end < state.committed_len:
        return True
    position = _first_difference(state, step.from_len, given_tokens(step))
    return position is not None and step.committed_len <= position < state.committed_len


def _first_difference(state: SequenceState, from_len: int, tokens: Sequence[int]) -> int | None:
    """The first position known to both at which they differ."""
    known = state.tokens[from_len : from_len + len(tokens)]
    return next((from_len + i for i, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b), None)


def _replace_tail(state: SequenceState, length: int, tail: Sequence[int]) -> int:
    """Cut the sequence to `length` tokens, append `tail`; return the rows of KV dropped."""
    del state.tokens[length:]
    state.tokens.extend(tail)
    dropped = max(0, state.kv_len - length)
    state.kv_len -= dropped
    return dropped
