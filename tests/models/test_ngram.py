"""The n-gram model through appends, rollbacks, checks of its drafts and reuse of a block."""

import random
from dataclasses import replace

from kvstate.protocol import Sampling
from models.backend import GuessSink, Slice, TopSink
from models.lookup import HitRates
from models.ngram import NgramBackend


def slice_of(tokens: list[int], start: int, sample_from: int, block: int = 0, stop_below: float = 0.0) -> Slice:
    return Slice(tokens, start, len(tokens), sample_from, 1, [block], Sampling(), None, stop_below)


def make(**options: int) -> NgramBackend:
    return NgramBackend("bytes+eos", frozenset({256}), context_len=4096, **options)


def test_drafts_what_followed_before() -> None:
    text = list(b"one two three four. one two")
    model = make()
    drafted: list[int] = []
    start = 0
    for _ in range(6):
        tokens = text + drafted
        (samples,) = model.forward([slice_of(tokens, start, len(tokens) - 1)])
        assert samples[0] is not None
        drafted.append(samples[0])
        start = len(tokens)
    assert bytes(drafted) == b" three"


def test_no_guess_without_a_match_and_bigrams_from_other_sequences() -> None:
    model = make()
    assert model.forward([slice_of([1, 2, 3], 0, 2)]) == [[None]]
    model.forward([slice_of([3, 9, 9, 3, 9], 0, 5, block=1)])
    assert model.forward([slice_of([1, 2, 3], 2, 2)]) == [[9]]


def test_a_guess_is_a_point_mass_and_no_guess_is_unknown() -> None:
    sink = TopSink(16)
    model = make()
    assert model.forward([replace(slice_of([1, 2, 3], 0, 2), tops=sink)]) == [[None]]
    assert model.forward([replace(slice_of([1, 2, 3, 1, 2], 3, 3), tops=sink)]) == [[2, 3]]
    assert sink.rows == [(), ((2, 1.0),), ((3, 1.0),)]


def test_own_guesses_teach_nothing() -> None:
    model = make()
    model.forward([slice_of([5, 6, 7, 5, 6], 0, 4)])  # guesses 7
    model.forward([slice_of([5, 6, 7, 5, 6, 7], 5, 5)])
    model.forward([slice_of([5, 6, 7, 5, 6, 8], 5, 6)])  # the target said 8, against one earlier 6 → 7
    assert model.forward([slice_of([0, 6], 0, 1, block=1)]) == [[8]]


def test_a_block_is_reused_by_another_sequence() -> None:
    model = make()
    model.forward([slice_of([1, 2, 3, 4, 1, 2], 0, 6)])
    assert model.forward([slice_of([8, 1, 2, 9, 9, 1, 2], 0, 6)]) == [[9]]


def test_a_sequence_that_made_room_is_indexed_again() -> None:
    model = make(most_indexed=1)
    model.forward([slice_of([1, 2, 3, 1], 0, 4)])
    model.forward([slice_of([7, 7], 0, 2, block=1)])
    assert model.forward([slice_of([1, 2, 3, 1, 2], 4, 4)]) == [[3]]


def test_checked_rows_all_get_samples() -> None:
    (samples,) = make().forward([slice_of([1, 2, 3, 1, 2, 3, 1], 0, 4)])
    assert samples == [3, 1, 2]


class Text:
    """One sequence as an engine drives it: drafts, checked against a text that is known in advance."""

    def __init__(self, model: NgramBackend, prompt: list[int], continuation: list[int], block: int = 0) -> None:
        self.model, self.tokens, self.rest, self.block = model, list(prompt), list(continuation), block
        self.computed = 0

    def round(self, count: int, stop_below: float) -> tuple[list[int], int]:
        """The draft and how many of its tokens were right; the text goes on behind them by one token of its own."""
        drafted: list[int] = []
        while len(drafted) < count:
            tokens = self.tokens + drafted
            (samples,) = self.model.forward([slice_of(tokens, self.computed, len(tokens) - 1, self.block, stop_below)])
            self.computed = len(tokens)
            if samples[0] is None:
                break
            drafted.append(samples[0])
        right = next((i for i, token in enumerate(drafted) if token != self.rest[i]), len(drafted))
        self.tokens += self.rest[: right + 1]
        del self.rest[: right + 1]
        self.computed = min(self.computed, len(self.tokens) - 1)
        return drafted, right


def test_drafts_are_long_where_guesses_were_right_and_short_where_they_were_wrong() -> None:
    phrase = list(range(20))
    steady = Text(make(), phrase * 2, phrase * 10)
    assert [len(steady.round(12, 0.2)[0]) for _ in range(8)][-1] == 12
    rng = random.Random(1)
    erratic = Text(make(), phrase, [rng.choice(phrase) for _ in range(400)])
    lengths = [len(erratic.round(12, 0.2)[0]) for _ in range(300)]
    assert sum(lengths[150:]) < 15
    assert sum(lengths[:20]) > 5


def test_without_a_limit_every_guess_is_drafted() -> None:
    rng = random.Random(1)
    phrase = list(range(20))
    text = Text(make(), phrase * 2, [rng.choice(phrase) for _ in range(200)])
    assert {len(text.round(4, 0.0)[0]) for _ in range(100)} == {4}


def test_withheld_guesses_are_judged_too() -> None:
    """Else a kind of guess that was wrong a few times would never be drafted again."""
    rng, model = random.Random(1), make()
    phrase = list(range(20))
    erratic = Text(model, phrase, [rng.choice(phrase) for _ in range(400)])
    for _ in range(300):
        erratic.round(12, 0.2)
    steady = Text(model, phrase, phrase * 70, block=1)
    lengths = [len(steady.round(12, 0.2)[0]) for _ in range(100)]
    assert lengths[0] < 6
    assert sum(lengths[-5:]) > 50


def test_accepted_drafts_teach_and_rejected_ones_do_not() -> None:
    model = make()
    text = Text(model, [5, 6, 7, 5, 6], [7, 5, 6, 7, 9, 1, 2, 3, 4])
    drafted, right = text.round(5, 0.0)
    assert (drafted, right) == ([7, 5, 6, 7, 5], 4)
    text.round(1, 0.0)
    other = Text(model, [0, 6], [0] * 9, block=1)
    assert other.round(1, 0.0)[0] == [7]
    assert Text(model, [0, 7], [0] * 9, block=2).round(1, 0.0)[0] == [5]  # twice, against one 9


def test_hotter_samples_have_rates_of_their_own() -> None:
    model, phrase = make(), list(range(20))
    text = Text(model, phrase * 2, phrase * 10)
    for _ in range(8):
        text.round(12, 0.2)
    tokens = phrase * 2
    hot = Slice(tokens, 0, 40, 39, 1, [1], Sampling(temperature=1.0), None, 0.5)
    assert model.forward([hot]) == [[None]]
    assert model.forward([slice_of(tokens, 0, 39, 2, 0.5)]) == [[0]]


def test_guesses_of_an_ended_sequence_are_not_judged_by_the_next_one() -> None:
    model = make()
    model.forward([slice_of([7, 8, 9, 7, 8], 0, 4)])  # guesses 9 for position 5, and ends
    model.forward([slice_of([3, 4, 5, 6, 3, 4, 5, 6], 0, 8)])  # another prompt in its block
    assert model._rates[0].rate(("match", 2)) == HitRates().rate(("match", 2))


def test_stated_guesses_are_those_known_best_first_and_none_where_nothing_was_drafted() -> None:
    sink = GuessSink(2)
    model = make()
    model.forward([replace(slice_of([1, 2, 3], 0, 2), guesses=sink)])
    model.forward([replace(slice_of([1, 2, 3, 1, 2, 4, 2, 4, 1, 2], 3, 9), guesses=sink)])
    [stated] = sink.rows
    assert stated[0][0] == 4
    assert [rate for _, rate in stated] == sorted((rate for _, rate in stated), reverse=True)
    assert len({token for token, _ in stated}) == len(stated)
