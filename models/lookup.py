"""What a text's own tokens suggest as the next one, and how often such suggestions were right. Pure.

Three sources: what followed the longest earlier occurrence of the text's end (`SuffixIndex`), and what usually follows
its last one or two tokens in all texts seen (`FollowerMemory`). `HitRates` tells which of them to believe.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_MOST_CANDIDATES = 64
"""Earlier occurrences of the last bigram that are compared, most recent first: bounds the cost of repetitive text."""

_NEVER = -1
"""Ends a chain of positions; inside the index only, where a plain int keeps the walk cheap."""

_MOST_VOTES = 8
_MOST_TRIALS = 300.0
_PRIOR_HITS, _PRIOR_TRIALS = 1.0, 2.5

Kind = tuple[str, int]
"""What a guess rests on: ("match", its length), or ("follower", votes) of the last token, ("pair", votes) of two."""


@dataclass(frozen=True, slots=True)
class Guess:
    token: int
    kind: Kind


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

    def longest_match(self, max_order: int) -> "Guess | None":
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
        return None if best_position == _NEVER else Guess(self.tokens[best_position + 1], ("match", best_len))

    def _match_len(self, position: int, end: int, max_order: int) -> int:
        tokens = self.tokens
        match_len = 2
        most_len = min(max_order, position + 1)
        while match_len < most_len and tokens[position - match_len] == tokens[end - match_len]:
            match_len += 1
        return match_len


class FollowerMemory:
    """The usual follower of one token and of two, over all texts: one candidate each, with votes for and against.

    `most_entries` bounds it; what came first is forgotten first.
    """

    def __init__(self, most_entries: int) -> None:
        self._most_entries = most_entries
        self._followers: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def learn(self, before: Sequence[int], follower: int) -> None:
        """`follower` came after the tokens `before`, of which the last two count."""
        for _, context in _contexts(before):
            known, votes = self._followers.get(context, (follower, 0))
            if known == follower:
                self._followers[context] = (follower, min(votes + 1, _MOST_VOTES))
            else:
                self._followers[context] = (known, votes - 1) if votes > 1 else (follower, 1)
        while len(self._followers) > self._most_entries:
            self._followers.popitem(last=False)

    def guesses(self, before: Sequence[int]) -> Iterator[Guess]:
        for name, context in _contexts(before):
            entry = self._followers.get(context)
            if entry is not None:
                yield Guess(entry[0], (name, entry[1]))


def _contexts(before: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Token ids are below 2³², so the keys of one token and of two never meet."""
    if before:
        yield "follower", before[-1]
    if len(before) > 1:
        yield "pair", (before[-2] + 1) << 32 | before[-1]


class HitRates:
    """How often guesses of each kind were right; the oldest of many trials fade."""

    def __init__(self) -> None:
        self._counts: dict[Kind, tuple[float, float]] = {}

    def add(self, kind: Kind, hit: bool) -> None:
        hits, trials = self._counts.get(kind, (_PRIOR_HITS, _PRIOR_TRIALS))
        fade = min(1.0, _MOST_TRIALS / (trials + 1.0))
        self._counts[kind] = (hits * fade + hit, trials * fade + 1.0)

    def rate(self, kind: Kind) -> float:
        hits, trials = self._counts.get(kind, (_PRIOR_HITS, _PRIOR_TRIALS))
        return hits / trials
