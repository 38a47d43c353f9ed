"""Prompt lookup: the next token is what followed the longest earlier occurrence of the sequence's last tokens.

No weights and no KV in the usual sense. The "KV" of a sequence is its token list with an index of bigrams, kept in one
block that is as long as the context: so a block id names a sequence, and rows below `start` are in the index exactly
when another backend would have them in its cache. Appending a token and rolling one back are both O(1). Only the
sequences used last are kept; another one that returns is indexed again from its tokens (about 2 ms for 4,096).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from models.backend import Slice

_MOST_CANDIDATES = 64
"""Earlier occurrences of the last bigram that are compared, most recent first: bounds the cost of repetitive text."""

_NEVER = -1
"""Ends a chain of positions; inside the index only, where a plain int keeps the walk cheap."""


@dataclass(slots=True)
class SuffixIndex:
    """Tokens of one sequence, chained by bigram.

    `last[a << 32 | b]` is the most recent position p with tokens[p − 1 : p + 1] = (a, b); `before[p]` the position
    before p with the same bigram: together a chain through all its occurrences.
    """

    tokens: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)

    def append(self, token: int) -> None:
        position = len(self.tokens)
        before = _NEVER
        if position:
            bigram = self.tokens[-1] << 32 | token
            before = self.last.get(bigram, _NEVER)
            self.last[bigram] = position
        self.tokens.append(token)
        self.before.append(before)

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on; the chains are as they were before those were appended."""
        while len(self.tokens) > length:
            token, before = self.tokens.pop(), self.before.pop()
            if not self.tokens:
                continue
            bigram = self.tokens[-1] << 32 | token
            if before == _NEVER:
                del self.last[bigram]
            else:
                self.last[bigram] = before

    def next_token(self, max_order: int) -> int | None:
        """What followed the longest earlier match (2 … `max_order` tokens) of the end; the most recent among equals."""
        end = len(self.tokens) - 1
        position = self.before[end] if end >= 0 else _NEVER
        best_len, best_position = 0, _NEVER
        for _ in range(_MOST_CANDIDATES):
            if position == _NEVER or best_len >= max_order:
                break
            match_len = self._match_len(position, end, max_order)
            if match_len > best_len:
                best_len, best_position = match_len, position
            position = self.before[position]
        return None if best_position == _NEVER else self.tokens[best_position + 1]

    def _match_len(self, position: int, end: int, max_order: int) -> int:
        tokens = self.tokens
        match_len = 2
        most_len = min(max_order, position + 1)
        while match_len < most_len and tokens[position - match_len] == tokens[end - match_len]:
            match_len += 1
        return match_len


class BigramMemory:
    """token → its usual follower in all sequences of this replica: one candidate each, with votes for and against."""

    def __init__(self, most_entries: int) -> None:
        self._most_entries = most_entries
        self._followers: dict[int, tuple[int, int]] = {}

    def learn(self, token: int, follower: int) -> None:
        known, votes = self._followers.get(token, (follower, 0))
        if known == follower:
            self._followers[token] = (follower, min(votes + 1, 8))
        else:
            self._followers[token] = (known, votes - 1) if votes > 1 else (follower, 1)
        if len(self._followers) > self._most_entries:
            del self._followers[next(iter(self._followers))]

    def next_token(self, token: int) -> int | None:
        entry = self._followers.get(token)
        return None if entry is None else entry[0]


@dataclass(slots=True)
class _Sequence:
    index: SuffixIndex = field(default_factory=SuffixIndex)
    guessed: int | None = None


class NgramBackend:
    """Implements `models.backend.Backend`; `num_blocks` is the most sequences held at once.

    Works for any vocabulary: pass the fingerprint and the end ids of the chain's target.
    """

    def __init__(
        self,
        vocabulary: str,
        end_ids: frozenset[int],
        context_len: int,
        num_blocks: int = 4096,
        max_order: int = 8,
        most_bigrams: int = 65536,
        most_indexed: int = 512,
    ) -> None:
        self.vocabulary = vocabulary
        self.end_ids = end_ids
        self.context_len = context_len
        self.block_tokens = context_len
        self.num_blocks = num_blocks
        self._max_order = max_order
        self._bigrams = BigramMemory(most_bigrams)
        self._most_indexed = most_indexed
        self._sequences: OrderedDict[int, _Sequence] = OrderedDict()

    def forward(self, slices: Sequence[Slice]) -> list[list[int | None]]:
        return [self._run(slice_) for slice_ in slices]

    def _run(self, slice_: Slice) -> list[int | None]:
        sequence = self._sequence_at(slice_)
        samples: list[int | None] = []
        for position in range(slice_.start, slice_.end):
            self._append(sequence, slice_.tokens[position])
            sequence.guessed = None
            if position >= slice_.sample_from:
                sequence.guessed = self._guess(sequence.index)
                samples.append(sequence.guessed)
        return samples

    def _sequence_at(self, slice_: Slice) -> _Sequence:
        """The sequence as it was before row `start`: rolled back, or indexed again if it had to make room."""
        sequence = self._sequences.setdefault(slice_.block_ids[0], _Sequence())
        self._sequences.move_to_end(slice_.block_ids[0])
        if len(self._sequences) > self._most_indexed:
            self._sequences.popitem(last=False)
        if slice_.start < len(sequence.index.tokens):
            sequence.index.truncate(slice_.start)
            sequence.guessed = None
        for position in range(len(sequence.index.tokens), slice_.start):
            sequence.index.append(slice_.tokens[position])
        return sequence

    def _append(self, sequence: _Sequence, token: int) -> None:
        """A token that this model guessed itself teaches nothing: it may be a draft that nobody has checked."""
        index = sequence.index
        if index.tokens and token != sequence.guessed:
            self._bigrams.learn(index.tokens[-1], token)
        index.append(token)

    def _guess(self, index: SuffixIndex) -> int | None:
        found = index.next_token(self._max_order)
        return found if found is not None else self._bigrams.next_token(index.tokens[-1])
