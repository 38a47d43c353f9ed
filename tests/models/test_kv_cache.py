"""The layout of packed rows: every position is read where it was written, whatever order its blocks have."""

import itertools
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstate.protocol import Sampling
from models.backend import Slice
from models.kv_cache import KVCache, pack_rows

BLOCK_TOKENS = 4
CPU = torch.device("cpu")


def read_slots(block_ids: list[int], start: int, end: int) -> tuple[list[int], list[int]]:
    """(slots that the rows' keys are read from, slots that they are written to)."""
    cache = KVCache(1, 64, 1, 1, torch.float64, CPU)
    pack = pack_rows([Slice([0] * end, start, end, end, end, block_ids, Sampling())], BLOCK_TOKENS, cache)
    return torch.arange(64)[pack.sequences[0].slots].tolist(), torch.arange(64)[pack.write_slots].tolist()


@pytest.mark.parametrize("block_ids", list(itertools.permutations([1, 2, 3])) + [(1, 5, 3), (0, 9, 2), (2, 0, 4)])
def test_positions_are_read_where_they_were_written(block_ids: tuple[int, ...]) -> None:
    wanted = [block * BLOCK_TOKENS + offset for block in block_ids for offset in range(BLOCK_TOKENS)]
    assert read_slots(list(block_ids), 5, 12) == (wanted, wanted[5:])
    assert read_slots(list(block_ids), 9, 10) == (wanted[:10], wanted[9:10])


@given(st.permutations(range(8)), st.integers(1, 32), st.data())
def test_any_block_order_and_length(block_ids: list[int], end: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, end - 1))
    wanted = [block * BLOCK_TOKENS + offset for block in block_ids for offset in range(BLOCK_TOKENS)][:end]
    assert read_slots(block_ids, start, end) == (wanted, wanted[start:])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says how much memory a process has")
def test_room_that_nobody_wrote_to_takes_no_memory() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    cache = KVCache(1, 2**19, 4, 64, torch.bfloat16, CPU)  # 1 GiB, in float32
    assert float(cache.keys[0][-1].abs().sum()) == 0.0
    assert resident_bytes() - before < 2**26
