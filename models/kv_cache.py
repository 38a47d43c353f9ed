"""KV tensors in paged blocks, and attention over them for packed rows of many sequences.

Letters: R packed rows, T rows of one sequence, L positions of one sequence with KV, H query heads, G key/value heads,
D head size. A *slot* is one position's place: block_id · block_tokens + offset. Who may use which block is decided
elsewhere (kvstate/allocator.py); rolling back is only a shorter L, the stale slots are overwritten later.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from models.backend import Slice


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Where one sequence's rows stand: packed rows `first` … `first + count` − 1, at positions `start` … `end` − 1."""

    first: int
    start: int
    end: int
    slots: slice | torch.Tensor

    @property
    def count(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class Pack:
    """One forward's layout; built once, read by every layer. `masks` are shared by layers with the same window."""

    sequences: list[SequenceRows]
    write_slots: torch.Tensor  # [R], without padding rows
    cache: "KVCache"
    calls: dict[int, int] = field(default_factory=dict)
    masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)

    def mask(self, index: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """[T, L] bool: which positions a row may see (itself, earlier ones, within the window); None means all."""
        key = (index, window)
        if key not in self.masks:
            rows = self.sequences[index]
            self.masks[key] = _causal_mask(rows.start, rows.end, window, device)
        return self.masks[key]


class KVCache:
    """Keys and values of all layers: [num_blocks · block_tokens, G, D] each."""

    def __init__(
        self, num_layers: int, num_slots: int, heads: int, head_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_slots, heads, head_size)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]


def pack_rows(slices: Sequence[Slice], block_tokens: int, cache: KVCache, device: torch.device) -> Pack:
    """Lay out the rows of all slices one after another."""
    sequences, write_slots, first = [], [], 0
    for s in slices:
        slots = slots_of(s.block_ids, s.end, block_tokens)
        write_slots.extend(slots[s.start :])
        sequences.append(SequenceRows(first, s.start, s.end, _as_index(slots, device)))
        first += s.end - s.start
    return Pack(sequences, torch.tensor(write_slots, dtype=torch.long, device=device), cache)


def slots_of(block_ids: Sequence[int], num_positions: int, block_tokens: int) -> list[int]:
    """The slot of each position below `num_positions`."""
    blocks = -(-num_positions // block_tokens)
    slots = [b * block_tokens + offset for b in block_ids[:blocks] for offset in range(block_tokens)]
    return slots[:num_positions]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, R, D]
    key: torch.Tensor,  # [1, G, R, D]
    value: torch.Tensor,  # [1, G, R, D]
    pack: Pack,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Store the rows' keys and values, then attend each sequence's rows to its own positions; [1, R, H, D]."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    pack.calls[layer] = pack.calls.get(layer, 0) + 1
    keys, values, written = pack.cache.keys[layer], pack.cache.values[layer], pack.write_slots.numel()
    keys.index_copy_(0, pack.write_slots, key[0, :, :written].transpose(0, 1))
    values.index_copy_(0, pack.write_slots, value[0, :, :written].transpose(0, 1))
    out = query.new_zeros(1, query.shape[2], query.shape[1], query.shape[3])
    for index, rows in enumerate(pack.sequences):
        span = slice(rows.first, rows.first + rows.count)
        attended = scaled_dot_product_attention(
            query[:, :, span],
            keys[rows.slots].transpose(0, 1)[None],
            values[rows.slots].transpose(0, 1)[None],
            attn_mask=pack.mask(index, window, query.device),
            scale=scaling,
            enable_gqa=True,
        )
        out[:, span] = attended.transpose(1, 2)
    return out


def _as_index(slots: list[int], device: torch.device) -> slice | torch.Tensor:
    """A slice where the slots follow one another, so that reading them copies nothing."""
    if slots == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[-1] + 1)
    return torch.tensor(slots, dtype=torch.long, device=device)


def _causal_mask(start: int, end: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    if end - start == 1 and (window is None or end <= window):
        return None
    rows = torch.arange(start, end, device=device)[:, None]
    positions = torch.arange(end, device=device)[None, :]
    mask = positions <= rows
    return mask if window is None else mask & (positions > rows - window)
