"""The n-gram model against a search from the definition, through appends, rollbacks and reuse of a block."""

import random
import time

from kvstate.protocol import Sampling
from models.backend import Slice
from models.ngram import BigramMemory, NgramBackend, SuffixIndex


def longest_suffix(tokens: list[int], max_order: int) -> int | None:
    for order in range(min(max_order, len(tokens) - 1), 1, -1):
        suffix = tokens[-order:]
        for end in range(len(tokens) - 1, order - 1, -1):
            if tokens[end - order : end] == suffix:
                return tokens[end]
    return None


def slice_of(tokens: list[int], start: int, sample_from: int, block: int = 0) -> Slice:
    return Slice(tokens, start, len(tokens), sample_from, 1, [block], Sampling())


def make(**options: int) -> NgramBackend:
    return NgramBackend("bytes+eos", frozenset({256}), context_len=4096, **options)


def test_matches_the_definition_through_random_appends_and_rollbacks() -> None:
    rng = random.Random(3)
    index, found = SuffixIndex(), 0
    tokens: list[int] = []
    for _ in range(3000):
        if tokens and rng.random() < 0.2:
            keep = rng.randrange(max(0, len(tokens) - 9), len(tokens))
            del tokens[keep:]
            index.truncate(keep)
        if len(tokens) > 120:
            tokens = []
            index.truncate(0)
        tokens.append(rng.randrange(6))
        index.append(tokens[-1])
        assert index.next_token(8) == longest_suffix(tokens, 8)
        found += index.next_token(8) is not None
    assert found > 1000


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


def test_bigram_memory_is_bounded_and_follows_the_majority() -> None:
    memory = BigramMemory(most_entries=3)
    for token in range(5):
        memory.learn(token, token + 1)
    assert [memory.next_token(token) for token in range(5)] == [None, None, 3, 4, 5]
    for follower in (7, 7, 8, 7):
        memory.learn(4, follower)
    assert memory.next_token(4) == 7


def test_drafting_sixteen_tokens_of_a_long_repetitive_text_is_cheap() -> None:
    rng = random.Random(1)
    tokens = [rng.choice(b"etao ") for _ in range(4000)]
    model = make()
    model.forward([slice_of(tokens, 0, len(tokens))])
    took = []
    for _ in range(20):
        drafted = list(tokens)
        started = time.perf_counter()
        for start in range(len(tokens), len(tokens) + 16):
            drafted.append(rng.choice(b"etao "))
            model.forward([slice_of(drafted, start, start)])
        took.append(time.perf_counter() - started)
        model.forward([slice_of(tokens, len(tokens) - 1, len(tokens) - 1)])
    assert min(took) < 0.01
    print(f"16 drafts over 4,000 tokens: {min(took) * 1e3:.2f} ms")
