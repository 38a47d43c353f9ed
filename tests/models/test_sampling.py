"""Samples against the distribution they must come from, and the sets that top_k and top_p leave."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvstate.protocol import Sampling
from models.processing import Row
from models.sampling import guesses, sample, tops

LOGITS = torch.tensor([1.0, -0.5, 2.0, 0.3, -1.2, 0.0, 1.5, -2.0])
CHI_SQUARE_999 = {2: 13.816, 3: 16.266, 7: 24.322}
"""By degrees of freedom: exceeded by one correct sampler in a thousand; seeds here are fixed."""


def draws(logits: torch.Tensor, sampling: Sampling, count: int) -> np.ndarray:
    """How often each token was drawn at positions 0 … count − 1."""
    chosen = sample(logits.expand(count, -1), [Row(i, sampling) for i in range(count)])
    return np.bincount(chosen, minlength=logits.shape[0])


def softmax(logits: torch.Tensor, allowed: Sequence[int], temperature: float) -> np.ndarray:
    weights = np.zeros(logits.shape[0])
    weights[list(allowed)] = np.exp(logits.double().numpy()[list(allowed)] / temperature)
    return np.asarray(weights / weights.sum())


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    possible = expected > 0
    wanted = expected[possible] * counts.sum()
    return float((((counts[possible] - wanted) ** 2) / wanted).sum())


def test_greedy_takes_the_highest_and_of_equal_ones_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 3.0, 5.0, 5.0]])
    for temperature in (0.0, 9e-6):
        assert sample(logits, [Row(i, Sampling(temperature)) for i in (4, 5)]) == [1, 0]


def test_draws_follow_the_softmax() -> None:
    counts = draws(LOGITS, Sampling(temperature=0.8, seed=11), 50_000)
    assert chi_square(counts, softmax(LOGITS, range(8), 0.8)) < CHI_SQUARE_999[7]


def test_top_k_draws_from_exactly_the_k_highest() -> None:
    counts = draws(LOGITS, Sampling(temperature=1.0, top_k=3, seed=12), 5_000)
    assert set(np.flatnonzero(counts)) == {0, 2, 6}
    assert chi_square(counts, softmax(LOGITS, (0, 2, 6), 1.0)) < CHI_SQUARE_999[2]


def test_top_k_prefers_the_lower_of_equal_ids() -> None:
    counts = draws(torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0]), Sampling(temperature=1.0, top_k=3, seed=13), 1_000)
    assert set(np.flatnonzero(counts)) == {0, 1, 2}


@pytest.mark.parametrize(
    ("mass", "kept"), [(0.49, {0}), (0.51, {0, 1}), (0.79, {0, 1}), (0.81, {0, 1, 2}), (0.96, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(mass: float, kept: set[int]) -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64))
    counts = draws(logits, Sampling(temperature=1.0, top_p=mass, seed=14), 1_000)
    assert set(np.flatnonzero(counts)) == kept


def test_top_p_counts_within_what_top_k_left() -> None:
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64))
    counts = draws(logits, Sampling(temperature=1.0, top_k=2, top_p=0.56, seed=15), 1_000)
    assert set(np.flatnonzero(counts)) == {0}, "0.4 / 0.7 is more than 0.56"


def test_rows_are_sampled_each_with_its_own_settings() -> None:
    samplings = [Sampling(), Sampling(1.0, seed=1), Sampling(0.7, top_k=2, seed=2), Sampling(1.3, top_p=0.9, seed=3)]
    rows = torch.stack([LOGITS, LOGITS.flip(0), LOGITS * 2, LOGITS / 2])
    alone = [sample(rows[i : i + 1], [Row(i + 10, samplings[i])])[0] for i in range(4)]
    assert sample(rows, [Row(i + 10, samplings[i]) for i in range(4)]) == alone


def test_same_seed_and_position_give_the_same_token_and_others_do_not() -> None:
    first, again, other = (
        sample(LOGITS.expand(64, -1), [Row(i, Sampling(1.0, seed=seed)) for i in range(64)]) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert len(set(first)) > 1


@pytest.mark.parametrize(
    ("sampling", "allowed", "temperature"),
    [
        (Sampling(temperature=0.8, seed=3), range(8), 0.8),
        (Sampling(temperature=0.8, top_k=3), (0, 2, 6), 0.8),
        (Sampling(temperature=1.0, top_p=0.5), (2, 6), 1.0),
        (Sampling(temperature=2.0, min_p=0.6), (0, 2, 6), 2.0),
        (Sampling(temperature=1.0, banned_ids=(2, 7)), (0, 1, 3, 4, 5, 6), 1.0),
        (Sampling(top_k=1, top_p=0.1, min_p=0.9), range(8), 1.0),
        (Sampling(banned_ids=(2,), end_ids=(6,), min_tokens=9), (0, 1, 3, 4, 5, 7), 1.0),
    ],
    ids=["temperature", "top_k", "top_p", "min_p", "masks", "greedy", "greedy with masks"],
)
def test_tops_are_the_likeliest_tokens_of_what_is_sampled(
    sampling: Sampling, allowed: Sequence[int], temperature: float
) -> None:
    expected = softmax(LOGITS, allowed, temperature)
    order = sorted(allowed, key=lambda token: -expected[token])
    for num_top in (1, 4, 8, 20):
        (top,) = tops(LOGITS[None], [Row(5, sampling, [1] * 5, 2)], num_top)
        assert [token for token, _ in top] == order[:num_top]
        assert [p for _, p in top] == pytest.approx([expected[token] for token in order[:num_top]], rel=1e-5)


def test_tops_of_each_row_follow_its_own_settings_and_context() -> None:
    penalty = Sampling(temperature=1.0, presence_penalty=2.5)
    tokens = [2, 6, 2, 6]
    rows = [Row(2, penalty, tokens, 2), Row(3, penalty, tokens, 2), Row(4, Sampling(), tokens, 2)]
    found = tops(LOGITS.expand(3, -1), rows, 2)
    assert [[token for token, _ in top] for top in found] == [[2, 6], [6, 0], [2, 6]]
    assert tops(LOGITS[None][:0], [], 2) == []


def test_guesses_begin_with_the_sample_and_fall_with_the_margin_of_scores() -> None:
    greedy, hot = Sampling(), Sampling(temperature=1.0, seed=9)
    rows = [Row(4, greedy), Row(5, hot), Row(6, hot)]
    logits = LOGITS.expand(3, -1)
    samples = sample(logits, rows)
    stated = guesses(logits, rows, samples, 3)
    assert [row[0][0] for row in stated] == samples
    assert [token for token, _ in stated[0]] == [2, 6, 0]
    weights = np.exp([2.0, 1.5, 1.0])
    assert [p for _, p in stated[0]] == pytest.approx(list(weights / weights.sum()))
    for row in stated:
        assert [p for _, p in row] == sorted((p for _, p in row), reverse=True)


def test_a_single_guess_knows_its_margin_to_the_next_one() -> None:
    [[(token, probability)]] = guesses(LOGITS[None], [Row(0, Sampling())], [2], 1)
    assert token == 2
    assert probability == pytest.approx(1.0 / (1.0 + np.exp(-0.5)))


def test_only_tokens_that_can_be_sampled_are_guessed() -> None:
    sampling = Sampling(temperature=1.0, top_k=2, seed=3)
    [token] = sample(LOGITS[None], [Row(7, sampling)])
    [stated] = guesses(LOGITS[None], [Row(7, sampling)], [token], 4)
    assert {token for token, _ in stated} == {2, 6}
    only = Sampling(top_k=1, temperature=1.0)
    assert guesses(LOGITS[None], [Row(7, only)], [2], 4) == [((2, 1.0),)]
