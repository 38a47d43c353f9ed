"""A sequence as the round driver sees it: what is committed, who holds it, and the next key.

Also the rules that end a request, applied to each committed token in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstate.protocol import FinishReason, Key, Sampling, Top

TOPS_EVERY = 32
"""Rounds per one whose target check states its likeliest tokens: finding them takes part of a forward's time."""

MOST_TOPS = 64
"""Committed positions of which the target's likeliest tokens are kept: as many as a probe covers."""


@dataclass(slots=True)
class Holder:
    """A replica with this sequence; messages to it carry the tokens from `acked_len` on.

    `kv_len`: the rows it had computed by its last reply; `is_reading` once it was asked to compute the prompt.
    """

    model: str
    replica_id: str
    acked_len: int = 0
    kv_len: int = 0
    is_reading: bool = False
    opened: bool = False


@dataclass(slots=True)
class RunningSequence:
    """`tokens`: prompt and committed output. `holders` by model name; a lost one is taken out.

    `logprobs` as in `OpenRequest`. `num_top`: how many likeliest tokens probes, and some of the target's checks, state;
    0 for none. `target_tops`: the target's, by position.
    """

    seq: int
    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    holders: dict[str, Holder]
    logprobs: int = -1
    epoch: int = 0
    step: int = 0
    num_top: int = 0
    target_tops: dict[int, Top] = field(default_factory=dict)

    def next_key(self) -> Key:
        self.step += 1
        return Key(self.epoch, self.step)

    def begin_round(self) -> None:
        self.epoch += 1

    def forget(self, replica_id: str) -> None:
        """A holder that is gone."""
        self.holders = {m: h for m, h in self.holders.items() if h.replica_id != replica_id}

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def num_top_of_check(self) -> int:
        """What the target's check of this round is asked for."""
        return self.num_top if self.epoch % TOPS_EVERY == 0 else 0

    def keep_tops(self, tops: Sequence[Top]) -> None:
        """Those of the target's verdict, whose tokens follow the committed ones; in most rounds none."""
        if not tops:
            return
        end = len(self.tokens) + len(tops)
        self.target_tops.update(enumerate(tops, len(self.tokens)))
        self.target_tops = {p: top for p, top in self.target_tops.items() if p >= end - MOST_TOPS}

    def last_tops(self, count: int) -> list[Top]:
        """The target's at the last `count` committed positions; empty where none were asked for."""
        return [self.target_tops.get(p, ()) for p in range(len(self.tokens) - count, len(self.tokens))]


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_tokens` output tokens at most; a token of `stop_ids` ends the output and is its last token."""

    max_tokens: int
    stop_ids: frozenset[int]

    def cut(self, output_len: int, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """The part of newly committed `tokens` that belongs to the output, given `output_len` tokens before them."""
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            if token in self.stop_ids:
                return kept, FinishReason.STOP
            if output_len + len(kept) >= self.max_tokens:
                return kept, FinishReason.LENGTH
        return kept, None


@dataclass(slots=True)
class TargetCounts:
    """What happened at the target for one request; `histogram[k]`: checks that accepted k drafted tokens."""

    checks: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    most_draft_tokens: int = 0
    histogram: list[int] = field(default_factory=list)

    def add(self, num_checked: int, num_accepted: int) -> None:
        self.checks += 1
        self.draft_tokens += num_checked
        self.accepted += num_accepted
        self.most_draft_tokens = max(self.most_draft_tokens, num_checked)
        self.histogram.extend([0] * (num_accepted + 1 - len(self.histogram)))
        self.histogram[num_accepted] += 1
