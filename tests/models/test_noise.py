"""The noise against an implementation of its own: numpy's uint64, whose arithmetic wraps by itself."""

import numpy as np
import pytest
import torch

from models import noise, seeds

CASES = [(0, 0, 0), (0, 0, 1), (1, 0, 0), (42, 7, 256), (2**63 - 1, 4095, 151_935), (2**64 - 1, 1_000_000, 128_255)]


def split_mix(word: np.uint64) -> np.uint64:
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.uint64(word ^ (word >> np.uint64(31)))


def plain_h32(seed: int, position: int, token: int) -> int:
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        word = split_mix(np.uint64(seed) + golden)
        word = split_mix(word + golden * np.uint64(position + 1))
        return int(split_mix(word + golden * np.uint64(token + 1)) >> np.uint64(32))


@pytest.mark.parametrize(("seed", "position", "token"), CASES)
def test_hash_equals_the_plain_one(seed: int, position: int, token: int) -> None:
    assert noise.h32(seed, position, torch.tensor(token)).item() == plain_h32(seed, position, token)


@pytest.mark.parametrize(("seed", "position", "token"), CASES)
def test_noise_is_the_gumbel_quantile_of_the_hash(seed: int, position: int, token: int) -> None:
    uniform = (plain_h32(seed, position, token) + 0.5) / 2**32
    expected = np.float32(-np.log(-np.log1p(uniform - 1.0)))
    assert noise.gumbel(seed, position, torch.tensor(token)).item() == pytest.approx(float(expected), rel=1e-6)


def test_scramble_gives_the_published_sequence() -> None:
    """The first outputs of SplitMix64 from state 1234567, as its reference implementation prints them."""
    mask = 2**64 - 1
    outputs = [seeds.scramble((1234567 + i * seeds.GOLDEN) & mask) for i in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_shape_does_not_change_the_noise() -> None:
    tokens = torch.arange(1000)
    whole = noise.gumbel(5, 9, tokens)
    assert whole.dtype == torch.float32
    assert torch.equal(noise.gumbel(5, 9, tokens.reshape(10, 100)).flatten(), whole)
    assert torch.equal(noise.gumbel(5, 9, tokens[[3, 998]]), whole[[3, 998]])


def test_noise_is_standard_gumbel() -> None:
    values = torch.cat([noise.gumbel(3, position, torch.arange(10_000)) for position in range(20)]).double()
    assert float(values.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(values.var()) == pytest.approx(np.pi**2 / 6, abs=0.03)


def test_most_bounds_the_noise_of_the_highest_hash() -> None:
    assert -np.log(-np.log1p((2**32 - 0.5) / 2**32 - 1.0)) < noise.MOST


def test_choices_have_seeds_of_their_own() -> None:
    assert seeds.mix(17, 0, 0) == 17
    distinct = {seeds.mix(17, prompt, choice) for prompt in range(50) for choice in range(50)}
    assert len(distinct) == 2500
    assert all(0 <= seed < 2**64 for seed in distinct)
