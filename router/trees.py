"""What a draft's positions leave open is checked with it: the draft and, beside its tokens, others held likely. Pure.

A node is worth a row of its checker where it is accepted often enough: that adds a token to the round, and saves the
time of one. The draft's own tokens are nodes 0, 1, 2, …; what stands beside them follows, the likeliest first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from router.acceptance import HALF_LIFE_POSITIONS
from router.fusion import Fused

LEAST_PROBABILITY = 0.01
"""Of a node to be accepted: below it, even a row that costs nothing is a token to be sent and compared."""

PRIOR_HITS = 8.0
"""How many tokens beside a draft must have been right to be believed as much as what was stated of them."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """`parents` as in `Check`; none where the tokens are just the draft."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...] = ()

    def on_draft(self, path: Sequence[int]) -> int:
        """How many tokens of an accepted path are the draft's own."""
        return next((i for i, node in enumerate(path) if node != i), len(path))


def grow(draft: Sequence[int], fused: Sequence[Fused], least: float, most_nodes: int, trust: float = 1.0) -> TokenTree:
    """Beside `draft`, of whose first tokens `fused` says what else was likely: all that is accepted with a probability
    of `least` or more, up to `most_nodes` with the draft. What is stated of it is believed `trust` times as much.
    """
    beside, reached = [], 1.0
    for depth, position in enumerate(fused[: len(draft)]):
        beside += [(reached * trust * p, depth, token) for token, p in position.likely[1:]]
        reached *= position.probability
    worth = [node for node in beside if node[0] >= max(least, LEAST_PROBABILITY)]
    chosen = sorted(worth, key=lambda node: -node[0])[: max(0, most_nodes - len(draft))]
    if not chosen:
        return TokenTree(tuple(draft))
    tokens = (*draft, *(token for _, _, token in chosen))
    return TokenTree(tokens, (*range(-1, len(draft) - 1), *(depth - 1 for _, depth, _ in chosen)))


@dataclass(slots=True)
class BesideRates:
    """How often tokens beside drafts were right, against what was stated of them; at positions a check decided."""

    _right: float = PRIOR_HITS
    _stated: float = PRIOR_HITS

    def observe(self, fused: Fused, truth: int) -> None:
        fade = 0.5 ** (1.0 / HALF_LIFE_POSITIONS)
        self._right = fade * self._right + any(token == truth for token, _ in fused.likely[1:])
        self._stated = fade * self._stated + sum(p for _, p in fused.likely[1:])

    @property
    def trust(self) -> float:
        return self._right / max(1e-9, self._stated)
