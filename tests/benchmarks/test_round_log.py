"""Rounds as a client saw them, and what is made of them."""

import pytest

from benchmarks.round_log import Round, ms_per_token, quantile, smoothed


def test_a_quantile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert quantile(values, 0.99) == 99.0
    assert quantile(values, 0.5) == 50.0
    assert quantile(values, 1.0) == 100.0
    assert quantile([3.0], 0.99) == 3.0


def test_time_per_token_counts_tokens_and_not_rounds() -> None:
    rounds = [Round(0.0, 10.0, 1), Round(0.0, 20.0, 5)]
    assert ms_per_token(rounds) == pytest.approx(5.0)


def test_smoothing_starts_once_it_has_enough() -> None:
    rounds = [Round(float(i), 10.0 * (i + 1), 1) for i in range(4)]
    assert smoothed(rounds, 2) == [(1.0, 15.0), (2.0, 25.0), (3.0, 35.0)]
