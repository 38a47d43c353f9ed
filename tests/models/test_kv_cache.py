"""Attention over paged blocks equals torch's over whole sequences, whatever order the blocks have."""

import itertools
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from kvstate.protocol import Sampling
from models.backend import Slice
from models.kv_cache import AnyCache, KVCache, States, TorchKVCache, pack_rows

BLOCK_TOKENS = 16
HEADS, KV_HEADS, SIZE = 6, 2, 16
NUM_BLOCKS = 40


def make_caches() -> list[AnyCache]:
    cpu = torch.device("cpu")
    sizes = (1, NUM_BLOCKS, BLOCK_TOKENS, KV_HEADS, SIZE)
    return [KVCache(*sizes), TorchKVCache(*sizes, torch.float32, cpu), TorchKVCache(*sizes, torch.float64, cpu)]


def states(seed: int, length: int) -> list[torch.Tensor]:
    """Queries, keys and values of a whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, heads, SIZE, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def whole(seed: int, length: int, window: int | None) -> torch.Tensor:
    """All rows at once by torch: [length, H, D]."""
    q, k, v = (part.transpose(0, 1)[None] for part in states(seed, length))
    at = torch.arange(length)
    mask = (at[None] <= at[:, None]) & (at[None] > at[:, None] - (window or length))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.25, enable_gqa=True)
    return out[0].transpose(0, 1)


def attend(cache: AnyCache, spans: list[tuple[int, int, int, list[int]]], window: int | None) -> list[torch.Tensor]:
    """Rows `start` … `end` − 1 of each (seed, start, end, blocks), in one forward."""
    pack = pack_rows([Slice([0] * end, start, end, end, end, blocks, Sampling()) for _, start, end, blocks in spans])
    rows = [[part[start:end] for part in states(seed, 60)] for seed, start, end, _ in spans]
    q, k, v = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return list(cache.attend(pack, 0, States(q, k, v, 0.25, window)).split([end - start for _, start, end, _ in spans]))


@pytest.mark.parametrize("block_ids", list(itertools.permutations([1, 2, 3])) + [(1, 5, 3), (0, 9, 2), (2, 0, 4)])
@pytest.mark.parametrize("window", [None, 5, 20])
def test_blocks_are_read_in_the_tables_order(block_ids: tuple[int, ...], window: int | None) -> None:
    for cache in make_caches():
        [first] = attend(cache, [(1, 0, 25, list(block_ids))], window)
        [rest] = attend(cache, [(1, 25, 45, list(block_ids))], window)
        torch.testing.assert_close(torch.cat((first, rest)).float(), whole(1, 60, window)[:45], atol=1e-5, rtol=1e-4)


@settings(deadline=None, max_examples=40)
@given(st.permutations(range(30)), st.lists(st.integers(1, 60), min_size=1, max_size=4), st.data())
def test_sequences_of_any_length_in_one_forward(order: list[int], lengths: list[int], data: st.DataObject) -> None:
    blocks = [order[4 * i : 4 * i + 4] for i in range(len(lengths))]
    starts = [data.draw(st.integers(0, length - 1)) for length in lengths]
    for cache in make_caches():
        for seed, (start, own) in enumerate(zip(starts, blocks, strict=True)):
            if start:
                attend(cache, [(seed, 0, start, own)], None)
        spans = [(seed, *span) for seed, span in enumerate(zip(starts, lengths, blocks, strict=True))]
        for seed, rows in enumerate(attend(cache, spans, None)):
            wanted = whole(seed, 60, None)[starts[seed] : lengths[seed]]
            torch.testing.assert_close(rows.float(), wanted, atol=1e-5, rtol=1e-4)


def test_what_lies_behind_a_rollback_is_never_seen() -> None:
    for cache in make_caches():
        attend(cache, [(1, 0, 60, [3, 1, 2, 0])], None)
        attend(cache, [(2, 0, 20, [3, 1])], None)
        [rows] = attend(cache, [(2, 20, 35, [3, 1, 2])], None)
        torch.testing.assert_close(rows.float(), whole(2, 60, None)[20:35], atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says how much memory a process has")
def test_room_that_nobody_wrote_to_takes_no_memory() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    cache = KVCache(1, 2**15, 16, 4, 64)  # 1 GiB
    assert float(abs(cache.keys[0][-1]).sum()) == 0.0
    assert resident_bytes() - before < 2**26
