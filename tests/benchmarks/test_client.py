"""Times of an answer's events."""

import pytest

from benchmarks.client import Answer


def test_time_per_token_runs_from_one_event_to_another() -> None:
    answer = Answer("abcdefgh", [(1.0, 1), (1.1, 3), (1.2, 2), (1.5, 2)])
    assert answer.ms_per_token == pytest.approx(500.0 / 7)
    assert answer.ms_per_token_from(2, 5) == pytest.approx(100.0 / 2)
    assert answer.ms_per_token_from(5, 8) == pytest.approx(300.0 / 2)


def test_a_first_event_of_several_tokens_counts_them_all() -> None:
    assert Answer("abcd", [(1.0, 3), (1.5, 1)]).ms_per_token == pytest.approx(500.0)
