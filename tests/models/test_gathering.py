"""How long a forward waits for the sequences it just answered."""

import pytest

from models.gathering import Gathering


def returning(base_s: float, after_s: float) -> Gathering:
    """Sequence 1 came back so often that its time is known; 1 and 2 are answered at 100 s."""
    gathering = Gathering(base_s)
    for _ in range(200):
        gathering.answered([1], 0.0)
        gathering.returned(1, after_s)
    gathering.answered([1, 2], 100.0)
    return gathering


def test_it_waits_a_multiple_of_the_usual_time_until_all_are_back() -> None:
    gathering = returning(base_s=0.050, after_s=0.010)
    assert gathering.left_s(100.0) == pytest.approx(0.040, rel=0.01)
    gathering.returned(1, 100.004)
    assert gathering.left_s(100.004) == pytest.approx(0.0348, rel=0.01)
    gathering.returned(2, 100.005)
    assert gathering.left_s(100.005) == 0.0


def test_a_step_that_came_while_another_forward_ran_teaches_too() -> None:
    gathering = Gathering(base_s=0.050)
    for _ in range(200):
        gathering.answered([1], 0.0)
        gathering.answered([2], 0.040)
        gathering.returned(1, 0.010)
    assert gathering.return_s == pytest.approx(0.010, rel=0.01)


def test_it_never_waits_longer_than_a_second_forward_would_cost() -> None:
    assert returning(base_s=0.012, after_s=0.010).left_s(100.0) == pytest.approx(0.012)
    assert returning(base_s=0.009, after_s=0.010).left_s(100.0) == 0.0


def test_it_does_not_wait_for_sequences_that_ended_or_that_it_did_not_answer() -> None:
    gathering = returning(base_s=0.050, after_s=0.010)
    gathering.forget(1)
    gathering.returned(3, 100.001)
    assert gathering.left_s(100.0) > 0.0
    gathering.forget(2)
    assert gathering.left_s(100.0) == 0.0
