"""Which tokens are checked beside a draft."""

import random

import pytest

from kvstate.sequence import is_tree
from router.fusion import Fused
from router.trees import BesideRates, TokenTree, grow


def position(*likely: tuple[int, float]) -> Fused:
    return Fused({}, likely)


FUSED = [position((1, 0.9), (7, 0.08)), position((2, 0.5), (8, 0.3), (9, 0.15)), position((3, 0.6), (7, 0.4))]


def test_the_likeliest_stand_beside_the_draft_at_their_places() -> None:
    tree = grow([1, 2, 3], FUSED, 0.1, 16)
    # accepted with probability: 7 first .08, 8 and 9 second .27 and .135, 7 third .9 · .5 · .4 = .18
    assert tree == TokenTree((1, 2, 3, 8, 7, 9), (-1, 0, 1, 0, 1, 0))
    assert is_tree(tree.tokens, tree.parents)


def test_no_more_nodes_than_wished_and_none_that_is_worth_too_little() -> None:
    assert grow([1, 2, 3], FUSED, 0.1, 4).tokens == (1, 2, 3, 8)
    for least, most in ((0.3, 16), (0.0, 3), (0.0, 2)):
        assert grow([1, 2, 3], FUSED, least, most) == TokenTree((1, 2, 3))
    assert len(grow([1, 2, 3], FUSED, 0.0, 16).tokens) == 7


def test_only_positions_of_the_draft_count_and_stated_ones() -> None:
    assert grow([1], FUSED, 0.05, 16).tokens == (1, 7)
    assert grow([1, 2, 3], FUSED[:1], 0.05, 16).tokens == (1, 2, 3, 7)
    assert grow([], [], 0.0, 16) == TokenTree(())


@pytest.mark.parametrize(("path", "number"), [((0, 1, 2), 3), ((0, 3), 1), ((4,), 0), ((), 0)])
def test_how_much_of_a_path_is_the_draft(path: tuple[int, ...], number: int) -> None:
    assert TokenTree((1, 2, 3, 8, 7), (-1, 0, 1, 0, -1)).on_draft(path) == number


def test_what_is_stated_too_high_is_believed_less() -> None:
    rng, rates = random.Random(2), BesideRates()
    for _ in range(1000):
        rates.observe(position((1, 0.6), (2, 0.4)), 2 if rng.random() < 0.1 else 3)
    assert rates.trust == pytest.approx(0.25, abs=0.06)
    assert len(grow([1], [position((1, 0.6), (2, 0.1))], 0.05, 8, rates.trust).tokens) == 1
