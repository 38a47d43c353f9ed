"""Requests share drafters by what they are worth to each and what sharing costs."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from router.assignment import GIVE_S, MOST_ASSIGNED, Capacity, Given, assign
from router.snapshot import ModelCost


def capacity(per_sequence_ms: float, names: str = "abc", base_ms: float = 3.0) -> Capacity:
    return Capacity({n: ModelCost(n, 1, base_ms, 0.0, per_sequence_ms) for n in names}, window=6.0, check_ms=45.0)


def test_where_sharing_costs_nothing_all_get_what_they_want() -> None:
    wishes = [{"a": 0.9, "b": 0.5, "c": 0.4}] * 5
    assert not capacity(0.0).is_scarce()
    assert assign(wishes, capacity(0.0), 2) == [["a", "b"]] * 5


def test_an_expert_that_all_want_is_not_swamped() -> None:
    wishes = [{"a": 0.9, "b": 0.8, "c": 0.2}] * 8
    given = [got[0] for got in assign(wishes, capacity(1.5), 1)]
    assert {"a", "b"} <= set(given)
    assert 3 <= given.count("a") < 8


def test_those_who_need_it_most_get_it() -> None:
    wishes = [{"a": 0.9, "b": 0.3}, {"a": 0.9, "b": 0.88}]
    assert assign(wishes, capacity(6.0, "ab"), 1) == [["a"], ["b"]]


def test_the_sum_is_the_largest_of_all_assignments() -> None:
    rng, of = random.Random(1), capacity(2.0)

    def total(given: tuple[str, ...], wishes: list[dict[str, float]]) -> float:
        worth = sum(of.worth(wish[name]) for wish, name in zip(wishes, given, strict=True))
        counts = {name: given.count(name) for name in given}
        return worth - sum(of.place_cost(n, i) for n, count in counts.items() for i in range(1, count + 1))

    for _ in range(30):
        wishes = [{n: rng.uniform(0.2, 0.95) for n in "abc"} for _ in range(5)]
        best = max(total(given, wishes) for given in itertools.product("abc", repeat=5))
        got = tuple(names[0] for names in assign(wishes, of, 1))
        assert total(got, wishes) == pytest.approx(best)


def test_nobody_gets_a_drafter_twice_and_everybody_gets_one() -> None:
    rng = random.Random(2)
    wishes = [{n: rng.random() for n in "abc"} for _ in range(20)]
    for most in (1, 2, 3, 5):
        for got in assign(wishes, capacity(1.0), most):
            assert 1 <= len(got) == len(set(got)) <= most


def test_what_others_have_is_charged_and_replicas_share_it() -> None:
    wish = [{"a": 0.9, "b": 0.8, "c": 0.2}]
    assert assign(wish, capacity(1.5), 1) == [["a"]]
    assert assign(wish, capacity(1.5), 1, {"a": 8}) == [["b"]]
    of_many = replace(capacity(1.5), replicas={"a": 9})
    assert assign(wish, of_many, 1, {"a": 8}) == [["a"]]


def test_a_drafter_that_is_not_wished_is_not_given() -> None:
    assert assign([{"a": 0.1}, {"b": 0.1}], capacity(1.5), 3) == [["a"], ["b"]]


def test_more_than_are_given_anew_at_once_are_spread_all_the_same() -> None:
    """Each when it comes, from what is left; all in turn later; what one has while it ends is free again."""
    now_s, of = 0.0, capacity(1.5)
    given, wish = Given(lambda: now_s), {"a": 0.9, "b": 0.88, "c": 0.86}
    requests = range(4 * MOST_ASSIGNED)
    first = [given.get(request, wish, of, 1)[0] for request in requests]
    [all_at_once] = zip(*assign([wish] * len(requests), of, 1), strict=True)
    assert Counter(first) == Counter(all_at_once)
    left = [request for request in requests if first[request] != "a"]
    for request in set(requests) - set(left):
        given.forget(request)
    for _ in range(8):
        now_s += GIVE_S
        given.get(left[0], wish, of, 1)
    now = Counter(given.get(request, wish, of, 1)[0] for request in left)
    [all_at_once] = zip(*assign([wish] * len(left), of, 1), strict=True)
    best = Counter(all_at_once)
    assert all(abs(now[name] - best[name]) <= 3 for name in "abc")
    for request in requests:
        given.forget(request)
    assert len(given) == 0
    assert not any(given._taken.values())


def test_a_drafter_that_is_lost_is_replaced() -> None:
    given = Given(lambda: 0.0)
    assert given.get(1, {"a": 0.9, "b": 0.2}, capacity(1.5), 1) == ["a"]
    assert given.get(1, {"b": 0.2}, capacity(1.5), 1) == ["b"]
