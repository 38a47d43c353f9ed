"""Fusing one position from what several drafters state, and what fusing is worth."""

import random
from itertools import permutations

import pytest

from kvstate.protocol import Guesses
from router.fusion import FusionGain, fuse, independent


def as_stated(_: str, confidence: float) -> float:
    return confidence


def test_the_largest_summed_confidence_wins() -> None:
    stated: dict[str, Guesses] = {"a": ((1, 0.5),), "b": ((1, 0.45),), "c": ((2, 0.9),)}
    assert fuse(stated, as_stated).token == 1
    assert fuse({**stated, "b": ((1, 0.35),)}, as_stated).token == 2


def test_it_does_not_depend_on_who_answered_first() -> None:
    stated: dict[str, Guesses] = {"a": ((7, 0.5),), "b": ((3, 0.5),), "c": ((9, 0.5), (3, 0.2))}
    fused = {fuse(dict(order), as_stated).likely for order in permutations(stated.items())}
    assert {likely[0][0] for likely in fused} == {3}


def test_trust_replaces_what_is_stated() -> None:
    stated: dict[str, Guesses] = {"boaster": ((1, 0.9),), "modest": ((2, 0.6),)}
    assert fuse(stated, lambda name, _: 0.3 if name == "boaster" else 0.8).token == 2


def test_agreement_is_more_probable_than_each_alone_and_all_stated_tokens_are_ranked() -> None:
    both = fuse({"a": ((1, 0.7), (2, 0.1)), "b": ((1, 0.7), (3, 0.2))}, as_stated)
    assert both.probability > 0.85
    assert [token for token, _ in both.likely] == [1, 3, 2]
    assert sum(p for _, p in both.likely) <= 1.0
    against = fuse({"a": ((1, 0.7), (2, 0.1)), "b": ((2, 0.7), (3, 0.2))}, as_stated)
    assert against.probability < 0.7


def test_one_drafter_alone_is_believed_as_it_states() -> None:
    alone = fuse({"a": ((4, 0.8), (5, 0.1))}, as_stated)
    assert dict(alone.likely) == pytest.approx({4: 0.8, 5: 0.1})


@pytest.mark.parametrize("rates", [(0.85, 0.85, 0.45), (0.6, 0.5), (0.9, 0.3, 0.3, 0.3), (0.7,)])
def test_independent_errors_gain_what_a_simulation_says(rates: tuple[float, ...]) -> None:
    rng, right, trials = random.Random(4), 0.0, 40_000
    for _ in range(trials):
        stated: dict[str, Guesses] = {}
        for number, rate in enumerate(rates, 1):
            stated[str(number)] = ((0 if rng.random() < rate else number, rate),)
        # Equal sums are decided by id, which favours the right one here: half of them count.
        sums: dict[int, float] = {}
        for guesses in stated.values():
            sums[guesses[0][0]] = sums.get(guesses[0][0], 0.0) + guesses[0][1]
        best = [token for token, total in sums.items() if total > max(sums.values()) - 1e-9]
        right += (0 in best) / len(best)
    assert independent(rates) == pytest.approx(right / trials, abs=0.01)


def test_the_gain_fades_where_drafters_err_alike_and_stays_where_they_do_not() -> None:
    rng = random.Random(1)
    alike, own = FusionGain(), FusionGain()
    rates = (0.8, 0.8, 0.8)
    for _ in range(500):
        alike.observe(rates, sum(rng.random() < 0.8 for _ in range(4)), 4)
        own.observe(rates, sum(rng.random() < independent(rates) for _ in range(4)), 4)
    assert alike.acceptance(rates) == pytest.approx(0.8, abs=0.02)
    assert own.acceptance(rates) == pytest.approx(independent(rates), abs=0.02)
    assert alike.share < 0.3 < 0.8 < own.share


def test_of_many_drafters_two_that_are_right_are_enough() -> None:
    many = (0.75, 0.75, 0.45, 0.45, 0.45, 0.45, 0.45, 0.45)
    assert independent(many) == pytest.approx(0.985, abs=0.01)
    assert independent((0.9, *[0.05] * 7)) == pytest.approx(0.9, abs=0.02)
