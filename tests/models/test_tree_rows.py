"""Every row of a tree, accepted or not, has the logits of plain decoding along its path; so has what follows it.

A row alone in its forward is the reference, over blocks of its own. Unused blocks hold numbers that would show in any
row that read them. Below the engine: trees of several sequences share a forward, and any path may be the accepted one.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstate.protocol import Sampling
from models.backend import Slice
from models.kv_cache import KVCache, Pack
from models.transformers_backend import TransformersBackend
from models.trees import Known, Layout, Tree, lay_out
from tests.models.test_transformers_backend import FAMILIES, save
from tests.models.test_trees import load

SIZE = 16
PENALIZED = Sampling(
    0.9, seed=4, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.3, min_tokens=3, end_ids=(7,)
)
KINDS = [
    ("llama", torch.float32, "none"),
    ("llama", torch.bfloat16, "none"),
    ("llama", torch.bfloat16, "int8"),
    ("llama", torch.bfloat16, "int4"),
    ("sliding", torch.float32, "none"),
    ("phi", torch.float32, "none"),
    ("phi", torch.bfloat16, "none"),
    ("sliding", torch.float64, "none"),
]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{str(kind[1])[6:]}-{kind[2]}")
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TransformersBackend:
    family, dtype, quantization = request.param
    folder: Path = save(tmp_path_factory.mktemp(family), FAMILIES[family]())
    return load(folder, dtype, quantization)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    num_nodes = draw(st.integers(1, 12))
    parents = [draw(st.integers(-1, node - 1)) for node in range(num_nodes)]
    tokens = draw(st.lists(st.integers(0, 127), min_size=num_nodes, max_size=num_nodes, unique=True))
    return Tree(tuple(tokens), tuple(parents))


class Room:
    """The backend's blocks, given out once each, in an order in which neighbours lie apart."""

    def __init__(self, backend: TransformersBackend) -> None:
        self.backend = backend
        self._free = [*range(0, 128, 2), *range(1, 128, 2)]
        kept = backend._cache
        for each in (*kept.keys, *kept.values) if isinstance(kept, KVCache) else (*kept._keys, *kept._values):
            each[:] = 7.0

    def take(self, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count
        return taken

    def compute(self, *slices: Slice) -> tuple[list[torch.Tensor], list[list[int | None]]]:
        """Logits [rows, V] and samples by slice, of all its rows."""
        made: list[torch.Tensor] = []

        def logits(ids: list[int], wanted: list[int], pack: Pack) -> torch.Tensor:
            made.append(original(ids, wanted, pack))
            return made[0]

        original = self.backend._logits
        with patch.object(self.backend, "_logits", logits):
            samples = self.backend.forward(slices)
        return list(made[0].split([s.end - s.start for s in slices])), samples


class Plain:
    """One sequence, each row that is asked for alone in its forward; those before it are computed by another."""

    def __init__(self, room: Room, known: Sequence[int], sampling: Sampling) -> None:
        self._room, self._known, self._sampling = room, list(known), sampling
        self._table = room.take(6)
        self._compute(known, 0, len(known) - 1)

    def after(self, path: Sequence[int]) -> tuple[torch.Tensor, int | None]:
        text = [*self._known, *path]
        self._compute(text, len(self._known) - 1, len(text) - 1)
        logits, samples = self._compute(text, len(text) - 1, len(text))
        return logits[0], samples[0]

    def _compute(self, text: Sequence[int], start: int, end: int) -> tuple[torch.Tensor, list[int | None]]:
        if start == end:
            return torch.empty(0), []
        rows = Slice(text, start, end, start, len(self._known), self._table, self._sampling)
        [logits], [samples] = self._room.compute(rows)
        return logits, samples


def equal(tree: torch.Tensor, plain: torch.Tensor) -> bool:
    """To the bit where the kernels are ours; torch's products in float64 round by the number of rows."""
    return torch.allclose(tree, plain, rtol=0, atol=1e-10) if tree.dtype == torch.float64 else torch.equal(tree, plain)


def laid_out(room: Room, tree: Tree, known: Sequence[int], sampling: Sampling) -> Layout:
    """With the KV of all known tokens but the last computed at once, and the tree's forward prepared."""
    table, last = room.take(6), len(known) - 1
    if last > 0:
        room.compute(Slice(known, 0, last, 0, len(known), table, sampling))
    layout = lay_out(tree, Known(known, len(known), sampling, table), SIZE, room.take)
    room.backend.move(layout.moves)
    return layout


@settings(deadline=None, max_examples=8)
@given(
    st.lists(st.tuples(trees(), st.integers(1, 50)), min_size=1, max_size=2),
    st.sampled_from([Sampling(), PENALIZED]),
    st.randoms(use_true_random=False),
)
def test_every_row_and_every_continuation_equals_plain_decoding(
    backend: TransformersBackend, drawn: list[tuple[Tree, int]], sampling: Sampling, rng: random.Random
) -> None:
    room = Room(backend)
    texts = [[rng.randrange(128) for _ in range(known_len)] for _, known_len in drawn]
    layouts = [laid_out(room, tree, known, sampling) for (tree, _), known in zip(drawn, texts, strict=True)]
    logits, samples = room.compute(*(s for layout in layouts for s in layout.slices))
    for layout, known in zip(layouts, texts, strict=True):
        tree, plain, num_slices = layout.tree, Plain(room, known, sampling), len(layout.slices)
        rows, logits = torch.cat(logits[:num_slices]), logits[num_slices:]
        after, samples = layout.samples(samples[:num_slices]), samples[num_slices:]
        for row, node in zip(rows, after, strict=True):
            path = [tree.tokens[n] for n in tree.ancestors(None if node < 0 else node)]
            expected, sample = plain.after(path)
            assert equal(row, expected), (node, path)
            assert after[node] == sample
        accepted = tree.ancestors(rng.randrange(len(tree.tokens)))
        room.backend.move(layout.compaction(accepted))
        text = [*known, *(tree.tokens[n] for n in accepted), rng.randrange(128)]
        last = Slice(text, len(text) - 1, len(text), len(text) - 1, len(known), layout.tables[0], sampling)
        [[row]], [[sample]] = room.compute(last)
        expected, expected_sample = plain.after(text[len(known) :])
        assert equal(row, expected), "what follows the accepted path"
        assert sample == expected_sample
