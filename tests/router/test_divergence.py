"""Bounds from lists of likely tokens against the whole distributions, summed as the formulas say."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.protocol import Top
from router.divergence import Bounds, DivergenceEstimate, Interval, bounds

ROUNDING = 1e-9
DRAWS = 100_000


def total_variation(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.abs(p - q).sum() / 2)


def predicted_acceptance(p: np.ndarray, q: np.ndarray) -> float:
    both = np.flatnonzero((p > 0) & (q > 0))
    return sum(1.0 / float(np.maximum(p / p[v], q / q[v]).sum()) for v in both)


def likeliest(p: np.ndarray, count: int) -> Top:
    order = np.argsort(-p, kind="stable")[:count]
    return tuple((int(token), float(p[token])) for token in order if p[token] > 0)


def contains(interval: Interval, value: float) -> bool:
    return interval.least - ROUNDING <= value <= interval.most + ROUNDING


@st.composite
def pairs_of_distributions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Over one vocabulary, from nearly uniform to point masses, with zeros and equal values."""
    size = draw(st.integers(2, 12))
    weights = st.one_of(st.just(0.0), st.integers(1, 5).map(float), st.floats(1e-6, 1e3))
    masses = st.lists(weights, min_size=size, max_size=size).filter(lambda values: sum(values) > 0)
    p = np.array(draw(masses))
    q = p * np.array(draw(masses)) if draw(st.booleans()) else np.array(draw(masses))
    q = q if q.sum() > 0 else p
    return p / p.sum(), q / q.sum()


@given(pairs_of_distributions(), st.integers(1, 12), st.integers(1, 12))
def test_the_exact_values_lie_within_the_bounds(pair: tuple[np.ndarray, np.ndarray], k: int, m: int) -> None:
    p, q = pair
    found = bounds(likeliest(p, k), likeliest(q, m))
    assert contains(found.divergence, total_variation(p, q))
    assert contains(found.acceptance, predicted_acceptance(p, q))


@given(pairs_of_distributions())
def test_bounds_of_whole_distributions_are_exact(pair: tuple[np.ndarray, np.ndarray]) -> None:
    p, q = pair
    found = bounds(likeliest(p, len(p)), likeliest(q, len(q)))
    assert found.divergence == pytest.approx((total_variation(p, q),) * 2, abs=ROUNDING)
    assert found.acceptance == pytest.approx((predicted_acceptance(p, q),) * 2, abs=ROUNDING)


@given(pairs_of_distributions(), st.integers(1, 11))
def test_longer_lists_give_closer_bounds(pair: tuple[np.ndarray, np.ndarray], k: int) -> None:
    short, long = (bounds(likeliest(pair[0], n), likeliest(pair[1], n)) for n in (k, k + 1))
    for wide, close in zip(short, long, strict=True):
        assert wide.least <= close.least + ROUNDING
        assert close.most <= wide.most + ROUNDING


@given(pairs_of_distributions(), st.integers(1, 12))
def test_what_is_told_of_one_pair_does_not_depend_on_its_order(pair: tuple[np.ndarray, np.ndarray], k: int) -> None:
    tops = [likeliest(distribution, k) for distribution in pair]
    for one, other in zip(bounds(tops[0], tops[1]), bounds(tops[1], tops[0][::-1]), strict=True):
        assert one == pytest.approx(other, abs=ROUNDING)


def test_bounds_known_by_hand() -> None:
    """p lists .5 and leaves .5 out, q lists another token: they may share .5 on each other's tokens, or nothing."""
    assert bounds(((0, 0.5),), ((1, 0.5),)) == Bounds(Interval(0.0, 1.0), Interval(0.0, 1.0))
    found = bounds(((0, 0.6), (1, 0.3)), ((0, 0.8),))
    assert found.divergence == pytest.approx((0.2, 0.4))
    # Token 0: q's rest of .2 shares at most .2/.8 with what p has beside token 0, and at least nothing.
    assert found.acceptance.least == pytest.approx(1 / (1 / 0.6 + 1 / 0.8 - 1))


@pytest.mark.parametrize(("token", "likely"), [(4, 0.7), (9, 0.2), (5, 0.0)])
def test_a_point_mass_is_accepted_as_often_as_its_token_is_sampled(token: int, likely: float) -> None:
    found = bounds(((token, 1.0),), ((4, 0.7), (9, 0.2), (1, 0.1)))
    assert found.divergence == pytest.approx((1 - likely,) * 2)
    assert found.acceptance == pytest.approx((likely,) * 2)


def test_equal_distributions_are_always_accepted_however_unlikely_a_token() -> None:
    top = ((1, 1.0 - 1e-300), (2, 1e-300), (3, 5e-324))
    assert bounds(top, top) == Bounds(Interval(0.0, 0.0), Interval(1.0, 1.0))


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_the_predicted_acceptance_is_how_often_shared_noise_gives_the_same_token(spread: float) -> None:
    rng = np.random.default_rng(int(spread * 10))
    p, q = (np.exp(rng.normal(0.0, spread, 16)) for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    noise = rng.gumbel(size=(DRAWS, 16))
    equal = ((np.log(p) + noise).argmax(axis=1) == (np.log(q) + noise).argmax(axis=1)).mean()
    found = bounds(likeliest(p, 16), likeliest(q, 16))
    expected = found.acceptance.middle
    assert abs(equal - expected) < 4 * math.sqrt(expected * (1 - expected) / DRAWS)
    divergence = found.divergence.middle
    assert (1 - divergence) / (1 + divergence) <= expected <= 1 - divergence


def test_an_estimate_is_the_mean_over_positions_that_both_state() -> None:
    estimate = DivergenceEstimate()
    assert (estimate.bounds, estimate.divergence, estimate.acceptance) == (None, None, None)
    estimate.observe([((1, 1.0),), (), ((1, 1.0),), ((1, 1.0),)], [((1, 1.0),), ((1, 1.0),), ((2, 1.0),), ()])
    assert estimate.samples == 2
    assert estimate.bounds is not None
    assert estimate.divergence == pytest.approx((0.5, 0.5), abs=1e-3)
    assert estimate.acceptance == pytest.approx((0.5, 0.5), abs=1e-3)
    estimate.observe([()], [((1, 1.0),)])
    assert estimate.samples == 2


def test_an_estimate_follows_a_change() -> None:
    estimate = DivergenceEstimate()
    point: list[Top] = [((1, 1.0),)] * 1000
    estimate.observe(point, point)
    estimate.observe(point, [((1, 0.5), (2, 0.5))] * 1000)
    assert estimate.samples == 2000
    assert estimate.divergence == pytest.approx((0.5 * 0.5 / 0.75,) * 2, abs=1e-3)
    assert estimate.acceptance == pytest.approx((1 - 0.5 * 0.5 / 0.75,) * 2, abs=1e-3)
