"""The oracle against cases that can be worked out by hand."""

import pytest

from benchmarks.oracle import Level, best_by_length, best_windows, chains, ms_per_token


def test_the_target_alone_costs_one_batch_and_one_hop_per_token() -> None:
    assert ms_per_token([Level(45.0, 1.0, 0.5, 1.0, 0.25)], (), num_tokens=100) == pytest.approx(46.75)


def test_a_perfect_drafter_commits_its_window_and_one() -> None:
    levels = [Level(2.0, 1.0, per_token_ms=0.1, hop_ms=0.3), Level(10.0, 1.0, per_token_ms=0.2, hop_ms=0.4)]
    # 4 drafts: one row each and one catch-up row per round; the check has 5 rows and commits 5 tokens.
    expected = (4 * 2.0 + 5 * 0.1 + 0.3 + 10.0 + 5 * 0.2 + 0.4) / 5
    assert ms_per_token(levels, (4,), num_tokens=5_000) == pytest.approx(expected, rel=1e-3)


def test_a_perfect_middle_level_collects_until_its_window_is_full() -> None:
    levels = [Level(1.0, 1.0), Level(3.0, 1.0), Level(20.0, 1.0)]
    # Productions of 3 tokens: two of them fill a window of 4, so the target checks 6 and commits 7.
    assert ms_per_token(levels, (2, 4), num_tokens=700) == pytest.approx((2 * (2 * 1.0 + 3.0) + 20.0) / 7)


def test_two_levels_follow_the_truncated_geometric_series() -> None:
    levels = [Level(2.0, 0.6), Level(20.0, 1.0)]
    committed = sum(0.6**j for j in range(5))
    for errors in ("shared", "own"):
        measured = ms_per_token(levels, (4,), errors=errors, num_tokens=60_000)
        assert measured == pytest.approx((4 * 2.0 + 20.0) / committed, rel=0.015)


def test_shared_errors_make_a_middle_level_agree_more() -> None:
    levels = [Level(2.0, 0.5), Level(8.0, 0.7), Level(40.0, 1.0)]
    shared = ms_per_token(levels, (3, 3), errors="shared")
    own = ms_per_token(levels, (3, 3), errors="own")
    assert shared < 0.9 * own


def test_search_finds_the_optimum_of_a_formula() -> None:
    levels = [Level(2.0, 0.8), Level(20.0, 1.0)]

    def formula(w: int) -> float:
        return (2.0 * w + 20.0) / sum(0.8**j for j in range(w + 1))

    (window,), _ = best_windows(levels, num_tokens=8_000)
    assert formula(window) <= 1.02 * min(formula(w) for w in range(1, 17))


def test_best_by_length_names_a_chain_for_each_length() -> None:
    levels = [Level(1.0, 0.6), Level(30.0, 0.62), Level(40.0, 1.0)]
    best = best_by_length(levels, max_window=8, num_tokens=1_000)
    assert best[1].ms_per_token == 40.0
    assert best[2].chain == (0, 2)
    assert best[2].ms_per_token < best[3].ms_per_token
    assert list(chains(3)) == [(2,), (0, 2), (1, 2), (0, 1, 2)]


def test_a_target_that_errs_is_refused() -> None:
    with pytest.raises(ValueError, match="target"):
        ms_per_token([Level(1.0, 0.9)], ())
