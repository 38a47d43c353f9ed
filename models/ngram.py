"""The n-gram model: it guesses from the tokens themselves (models/lookup.py) and knows how likely it is right.

No weights and no KV in the usual sense. The "KV" of a sequence is its token list with an index of bigrams, kept in one
block that is as long as the context: so a block id names a sequence, and rows below `start` are in the index exactly
when another backend would have them in its cache. Appending a token and rolling one back are both O(1). Only the
sequences used last are kept; another one that returns is indexed again from its tokens.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstate.protocol import Guesses, Sampling
from models.backend import Move, Slice
from models.lookup import FollowerMemory, Guess, HitRates, SuffixIndex


@dataclass(slots=True)
class _Sequence:
    """`index` holds the rows computed, of which the first `num_learned` have taught the memory.

    run     the probability that everything drafted since the last known token is right
    opened  the guesses at positions whose tokens were not known then, from `first_open` on; the first of each is the
            one that was drafted or withheld
    """

    index: SuffixIndex = field(default_factory=SuffixIndex)
    num_learned: int = 0
    drafted: int | None = None
    run: float = 1.0
    first_open: int = 0
    opened: list[list[Guess]] = field(default_factory=list)

    def continues_draft(self, slice_: Slice) -> bool:
        """Whether the slice is the token just drafted and nothing else, unchecked by anybody."""
        is_next = slice_.start == len(self.index.tokens) and slice_.end == slice_.start + 1
        return is_next and self.drafted is not None and slice_.tokens[slice_.start] == self.drafted


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
        most_followers: int = 1 << 18,
        most_indexed: int = 512,
    ) -> None:
        self.vocabulary = vocabulary
        self.end_ids = end_ids
        self.context_len = context_len
        self.block_tokens = context_len
        self.num_blocks = num_blocks
        self._max_order = max_order
        self._memory = FollowerMemory(most_followers)
        self._rates = (HitRates(), HitRates(), HitRates())
        self._most_indexed = most_indexed
        self._sequences: OrderedDict[int, _Sequence] = OrderedDict()

    def move(self, moves: Sequence[Move]) -> None:
        """Only a target checks trees, and an n-gram model is none."""
        assert not moves, "an n-gram model is asked to check a tree"

    def forward(self, slices: Sequence[Slice]) -> list[list[int | None]]:
        return [self._run(slice_) for slice_ in slices]

    def _run(self, slice_: Slice) -> list[int | None]:
        sequence = self._sequence(slice_)
        rates = self._rates[_regime(slice_.sampling)]
        is_known = not sequence.continues_draft(slice_)
        if is_known:
            self._roll_back(sequence, slice_)
            self._learn(sequence, slice_, rates)
        samples: list[int | None] = []
        for position in range(slice_.start, slice_.end):
            sequence.index.append(slice_.tokens[position])
            if position >= slice_.sample_from:
                if is_known:
                    sequence.run = 1.0
                    sequence.opened.clear()
                samples.append(self._sample(sequence, rates, slice_.stop_below))
                if slice_.guesses is not None and samples[-1] is not None:
                    slice_.guesses.rows.append(_stated(sequence.opened[-1], rates, slice_.guesses.num_guesses))
                if slice_.tops is not None:
                    slice_.tops.rows.append(() if samples[-1] is None else ((samples[-1], 1.0),))
        sequence.drafted = samples[-1] if samples else None
        return samples

    def _sequence(self, slice_: Slice) -> _Sequence:
        """The sequence of this block; only those used last are kept."""
        sequence = self._sequences.setdefault(slice_.block_ids[0], _Sequence())
        self._sequences.move_to_end(slice_.block_ids[0])
        if len(self._sequences) > self._most_indexed:
            self._sequences.popitem(last=False)
        return sequence

    def _roll_back(self, sequence: _Sequence, slice_: Slice) -> None:
        """To row `start`, or on to it where the index had to make room. What is replaced was never there."""
        index, tokens = sequence.index, slice_.tokens
        if slice_.start == 0:
            sequence.opened.clear()  # of another sequence, which had this block before
        dropped = zip(index.tokens[slice_.start :], tokens[slice_.start :], strict=False)
        kept = next((i for i, (old, new) in enumerate(dropped) if old != new), len(index.tokens) - slice_.start)
        sequence.num_learned = min(sequence.num_learned, slice_.start + max(0, kept))
        index.truncate(slice_.start)
        for position in range(len(index.tokens), slice_.start):
            index.append(tokens[position])

    def _learn(self, sequence: _Sequence, slice_: Slice, rates: HitRates) -> None:
        """From tokens that somebody else sampled or accepted: which guesses were right, and what follows what."""
        tokens = slice_.tokens
        for position, guesses in enumerate(sequence.opened, sequence.first_open):
            if position >= slice_.end:
                break
            for guess in guesses:
                rates.add(guess.kind, guess.token == tokens[position])
            if guesses and guesses[0].token != tokens[position]:
                break  # later guesses followed a wrong token
        sequence.opened.clear()
        for position in range(sequence.num_learned, slice_.end):
            self._memory.learn(tokens[max(0, position - 2) : position], tokens[position])
        sequence.num_learned = max(sequence.num_learned, slice_.end)

    def _sample(self, sequence: _Sequence, rates: HitRates, stop_below: float) -> int | None:
        """The guess most often right; None if there is none or the draft would be right too seldom with it."""
        index = sequence.index
        found = index.longest_match(self._max_order)
        guesses = [*([found] if found else []), *self._memory.guesses(index.tokens[-2:])]
        guesses.sort(key=lambda guess: -rates.rate(guess.kind))
        if not sequence.opened:
            sequence.first_open = len(index.tokens)
        sequence.opened.append(guesses)
        if not guesses:
            return None
        sequence.run *= rates.rate(guesses[0].kind)
        return guesses[0].token if sequence.run >= stop_below else None


def _stated(guesses: Sequence[Guess], rates: HitRates, num_guesses: int) -> Guesses:
    """The best guess of each token, as often right as its kind was."""
    best: dict[int, float] = {}
    for guess in guesses:
        best.setdefault(guess.token, rates.rate(guess.kind))
    return tuple(best.items())[:num_guesses]


def _regime(sampling: Sampling) -> int:
    """Index of the rates: guesses are right less often the hotter the samples they should equal."""
    return 0 if sampling.temperature == 0.0 else 1 if sampling.temperature <= 0.5 else 2
