"""How far what drafters state of their confidence is believed."""

import random

import pytest

from router.calibration import Calibration, Trusting


def test_nothing_known_is_taken_as_stated() -> None:
    assert Trusting({}).trust("a", 0.7) == 0.7
    assert Calibration().of(0.2) == pytest.approx(0.2)


def test_a_boaster_is_believed_as_often_as_it_is_right() -> None:
    rng, calibrations = random.Random(2), dict[str, Calibration]()
    for _ in range(40):
        request = Trusting(calibrations)
        for _ in range(20):
            request.observe("boaster", 0.9, rng.random() < 0.5)
            request.observe("honest", 0.6, rng.random() < 0.6)
    fresh = Trusting(calibrations)
    assert fresh.trust("boaster", 0.9) == pytest.approx(0.5, abs=0.06)
    assert fresh.trust("honest", 0.6) == pytest.approx(0.6, abs=0.06)


def test_a_request_that_differs_is_believed_for_itself_alone() -> None:
    rng, calibrations = random.Random(3), {"a": Calibration()}
    for _ in range(600):
        calibrations["a"].observe(0.8, rng.random() < 0.8)
    odd = Trusting(calibrations)
    for _ in range(60):
        odd.observe("a", 0.8, rng.random() < 0.3)
    assert odd.trust("a", 0.8) < 0.5
    assert Trusting(calibrations).trust("a", 0.8) == pytest.approx(0.77, abs=0.08)
