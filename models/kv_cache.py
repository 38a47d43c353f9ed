"""Paged key/value tensors of one model, and how many blocks of them fit.

Position p of a sequence lives in *slot* block_ids[p // block_tokens] * block_tokens + p % block_tokens; rolling back is
writing over it. Which sequence owns which block is the allocator's business (`kvstate/`), not this module's.
Letters: N slots, T rows, Hkv key/value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores per position."""

    num_kv_heads: int
    key_size: int
    value_size: int


class KvCache:
    """Keys and values of every layer, [num_blocks × block_tokens, Hkv, D] each."""

    def __init__(
        self, shapes: Sequence[LayerShape], num_blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert num_blocks > 0 and block_tokens > 0
        self.num_slots = num_blocks * block_tokens
        self.block_tokens = block_tokens
        # Zeros, not empty: masked slots have weight 0 in attention, and 0 × NaN of old memory would be NaN.
        self._keys = [self._zeros(shape.num_kv_heads, shape.key_size, dtype, device) for shape in shapes]
        self._values = [self._zeros(shape.num_kv_heads, shape.value_size, dtype, device) for shape in shapes]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store T rows: slots [T] int64, keys and values [T, Hkv, D]."""
        self._keys[layer].index_copy_(0, slots, keys)
        self._values[layer].index_copy_(0, slots, values)

    def read(self, layer: int, where: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [T, Hkv, D] of a run of slots (a view) or of slots [T] (a copy)."""
        return self._keys[layer][where], self._values[layer][where]

    def _zeros(self, num_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.num_slots, num_heads, size, dtype=dtype, device=device)


def slots_of(block_ids: Sequence[int], start: int, end: int, block_tokens: int) -> list[int]:
    """Slots of the positions `start` … `end` − 1."""
    return [block_ids[p // block_tokens] * block_tokens + p % block_tokens for p in range(start, end)]


def run_start(block_ids: Sequence[int], num_positions: int, block_tokens: int) -> int | None:
    """First slot if the positions below `num_positions` lie in neighbouring blocks, else None."""
    used = block_ids[: -(-num_positions // block_tokens)]
    neighbours = all(after == before + 1 for before, after in zip(used, used[1:], strict=False))
    return used[0] * block_tokens if neighbours else None


def bytes_per_block(shapes: Sequence[LayerShape], block_tokens: int, bytes_per_number: int) -> int:
    """Bytes of one block over all layers."""
    numbers = sum(shape.num_kv_heads * (shape.key_size + shape.value_size) for shape in shapes)
    return numbers * block_tokens * bytes_per_number


def plan_blocks(
    block_bytes: int,
    context_blocks: int,
    free_bytes: int,
    kv_bytes: int | None = None,
    memory_fraction: float = 0.6,
    most_sequences: int = 64,
) -> int:
    """How many blocks to allocate: `kv_bytes` if given, else `memory_fraction` of the free memory.

    context_blocks  blocks of one sequence of the model's full context
    free_bytes      memory that is free once the weights are loaded
    most_sequences  never more than this many full contexts: a large machine need not set aside all it has

    ValueError if not even one block fits.
    """
    assert block_bytes > 0 and context_blocks > 0
    budget = kv_bytes if kv_bytes is not None else int(free_bytes * memory_fraction)
    blocks = budget // block_bytes
    if blocks < 1:
        raise ValueError(f"{budget} bytes hold no KV block of {block_bytes} bytes; raise kv.bytes or kv.memory_fraction")
    return min(blocks, context_blocks * most_sequences)
