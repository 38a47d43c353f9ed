"""Suggestions from a text's own tokens against a search from the definition; memory and hit rates stay bounded."""

import random

import pytest

from models.lookup import FollowerMemory, Guess, HitRates, SuffixIndex


def longest_suffix(tokens: list[int], max_order: int) -> Guess | None:
    for order in range(min(max_order, len(tokens) - 1), 1, -1):
        suffix = tokens[-order:]
        for end in range(len(tokens) - 1, order - 1, -1):
            if tokens[end - order : end] == suffix:
                return Guess(tokens[end], ("match", order))
    return None


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
        assert index.longest_match(8) == longest_suffix(tokens, 8)
        found += index.longest_match(8) is not None
    assert found > 1000


def test_memory_of_followers_is_bounded_and_follows_the_majority() -> None:
    memory = FollowerMemory(most_entries=3)
    for token in range(5):
        memory.learn([token], token + 1)
    assert [[g.token for g in memory.guesses([token])] for token in range(5)] == [[], [], [3], [4], [5]]
    for follower in (7, 7, 8, 7):
        memory.learn([4], follower)
    assert list(memory.guesses([4])) == [Guess(7, ("follower", 2))]


def test_one_token_and_two_before_it_are_remembered_apart() -> None:
    memory = FollowerMemory(most_entries=100)
    for before, follower in (([1, 2], 3), ([9, 2], 4), ([9, 2], 4)):
        memory.learn(before, follower)
    assert list(memory.guesses([1, 2])) == [Guess(4, ("follower", 2)), Guess(3, ("pair", 1))]
    assert list(memory.guesses([9, 2])) == [Guess(4, ("follower", 2)), Guess(4, ("pair", 2))]
    assert list(memory.guesses([0, 2])) == [Guess(4, ("follower", 2))]
    assert list(memory.guesses([])) == []


@pytest.mark.parametrize(("before", "after"), [(0.2, 0.2), (0.9, 0.2), (0.1, 0.8)])
def test_hit_rates_follow_what_happened_lately(before: float, after: float) -> None:
    rates, rng = HitRates(), random.Random(2)
    for rate, count in ((before, 2000), (after, 1500)):
        for _ in range(count):
            rates.add(("match", 3), rng.random() < rate)
    assert rates.rate(("match", 3)) == pytest.approx(after, abs=0.07)
    assert rates.rate(("match", 4)) == pytest.approx(0.4)
