"""Requests find the drafters that suit them, by a few positions and by their words."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec import structs

from router.expertise import groups_of, routing_vector
from router.learned import NOTHING, SubjectsLearned, UnreadableError, decode, encode
from router.subjects import MOST_SUBJECTS, NO_WORDS, Subjects, Words, words_of

DRAFTERS = [f"d{i}" for i in range(8)]
BASE = dict.fromkeys(DRAFTERS, 0.55)
TOPICS = [b"code: write a function ", b"math: what is the sum of ", b"law: may a tenant ", b"tale: once upon a "]


def rate(drafter: str, topic: int) -> float:
    return 0.85 if int(drafter[1:]) % 4 == topic else 0.45


def evidence(rng: random.Random, topic: int, drafters: Sequence[str], positions: int) -> dict[str, tuple[float, float]]:
    return {d: (positions, sum(rng.random() < rate(d, topic) for _ in range(positions))) for d in drafters}


def words(rng: random.Random, topic: int) -> Words:
    return words_of(list(TOPICS[topic] + str(rng.random()).encode()))


def taught(with_words: bool, requests: int = 100) -> Subjects:
    rng, subjects = random.Random(6), Subjects()
    for _ in range(requests):
        topic = rng.randrange(4)
        tried = rng.sample(DRAFTERS, 4)
        subjects.learn(BASE, evidence(rng, topic, tried, 25), words(rng, topic) if with_words else NO_WORDS)
    return subjects


def experts_found(subjects: Subjects, positions: int, with_words: bool) -> float:
    """Share of requests whose best drafter, after some positions of three drafters, is an expert of theirs."""
    rng, found, requests = random.Random(7), 0, 200
    for _ in range(requests):
        topic = rng.randrange(4)
        shown = evidence(rng, topic, rng.sample(DRAFTERS, 3), positions) if positions else {}
        suits = subjects.suits(BASE, shown, words(rng, topic) if with_words else NO_WORDS)
        best = max(suits, key=lambda d: suits[d].acceptance)
        found += int(best[1:]) % 4 == topic
    return found / requests


def test_a_few_positions_of_some_drafters_tell_of_the_others() -> None:
    subjects = taught(with_words=False)
    assert 4 <= len(subjects) <= 7
    assert experts_found(subjects, 8, with_words=False) > 0.75
    assert experts_found(Subjects(), 8, with_words=False) < 0.7


def test_what_was_found_outlives_a_restart() -> None:
    old = taught(with_words=True)
    file = encode(structs.replace(NOTHING, subjects={1: old.learned}))
    assert len(file) < 200_000
    new = Subjects.restored(decode(file).subjects[1])
    assert experts_found(new, 0, with_words=True) > 0.95
    rng = random.Random(8)
    for topic in range(4):
        shown, said = evidence(rng, topic, DRAFTERS[:3], 12), words(rng, topic)
        before, after = (subjects.suits(BASE, shown, said) for subjects in (old, new))
        for drafter in DRAFTERS:
            assert after[drafter].acceptance == pytest.approx(before[drafter].acceptance, abs=0.02)
    new.learn({**BASE, "d9": 0.5}, {"d9": (10.0, 9.0)})  # one drafter more
    assert new.learned.drafters == [*DRAFTERS, "d9"]


@pytest.mark.parametrize("change", [{"tried": [[1.0]]}, {"words": []}, {"requests": [1.0, 2.0]}])
def test_what_does_not_fit_together_is_not_restored(change: dict[str, Any]) -> None:
    subjects = SubjectsLearned(["a", "b"], [3.0], [[9.0, 4.0]], [[8.0, 1.0]], [{5: 2.0}])
    kept = decode(encode(structs.replace(NOTHING, subjects={1: subjects}))).subjects[1]
    assert kept == subjects
    fields = {name: change.get(name, getattr(subjects, name)) for name in subjects.__struct_fields__}
    data = msgspec.json.encode({**structs.asdict(NOTHING), "subjects": {"1": list(fields.values())}})
    with pytest.raises(UnreadableError, match="not one entry per"):
        decode(data)


def test_words_tell_before_any_position() -> None:
    assert experts_found(taught(with_words=True), 0, with_words=True) > 0.95
    assert experts_found(taught(with_words=False), 0, with_words=False) < 0.5


def test_positions_outweigh_words_that_mislead() -> None:
    rng, subjects = random.Random(8), taught(with_words=True)
    suits = subjects.suits(BASE, evidence(rng, 2, DRAFTERS, 20), words(rng, 0))
    assert {d for d in DRAFTERS if suits[d].acceptance > 0.7} == {"d2", "d6"}


def test_what_is_uncertain_says_so_and_what_was_shown_is_believed() -> None:
    nothing = Subjects().suits(BASE, {})
    assert all(s.acceptance == pytest.approx(0.55) and s.deviation > 0.1 for s in nothing.values())
    shown = Subjects().suits(BASE, {"d0": (200.0, 180.0)})
    assert shown["d0"].acceptance == pytest.approx(0.88, abs=0.03)
    assert shown["d0"].deviation < 0.06 < shown["d1"].deviation


def test_subjects_are_bounded_and_drafters_may_come_later() -> None:
    rng, subjects = random.Random(9), Subjects()
    for _ in range(200):
        subjects.learn(BASE, {d: (40.0, float(rng.choice((0, 40)))) for d in DRAFTERS})
    assert len(subjects) == MOST_SUBJECTS
    subjects.learn({**BASE, "new": 0.5}, {"new": (10.0, 9.0)})
    assert subjects.suits({**BASE, "new": 0.5}, {})["new"].acceptance > 0.4


def test_uncertainty_counts_for_a_drafter_and_use_counts_a_little() -> None:
    suits = Subjects().suits({"a": 0.6, "b": 0.6, "c": 0.6}, {"a": (30.0, 10.0), "b": (30.0, 27.0)})
    assert [entry.drafter for entry in routing_vector(suits)] == ["b", "c", "a"]
    equal = Subjects().suits({"a": 0.6, "b": 0.6}, {})
    assert [entry.drafter for entry in routing_vector(equal, ["b"])] == ["b", "a"]


def test_groups_grow_from_the_best_and_are_named_in_the_order_of_models() -> None:
    assert groups_of(["c", "a", "b"], ["a", "b", "c", "t"]) == ["a|c", "a|b|c"]
    assert groups_of(["c"], ["a", "c"]) == []
    many = [f"d{i}" for i in range(10)]
    assert [len(group.split("|")) for group in groups_of(many, many)] == [2, 3, 4, 6, 8, 10]
