"""KV tensors in paged blocks, and attention over them for packed rows of many sequences.

Letters: R packed rows, T rows of one sequence, L positions of one sequence with KV, H query heads, G key/value heads,
D head size. A *slot* is one position's place: block_id · block_tokens + offset. Who may use which block is decided
elsewhere (kvstate/allocator.py); rolling back is only a shorter L, the stale slots are overwritten later.

On a CPU keys and values are float32 where the model has fewer bits, and attention runs in shapes for which torch's
kernel gives a row the same bits whatever rows are computed with it: 4 to 32 query rows, lengths in whole multiples of
512 under a mask. What is read beyond a sequence's end is finite and masked, so it adds exactly nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from models.backend import Slice

LEAST_QUERIES, MOST_QUERIES = 4, 32
LENGTH_STEP = 512


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Where one sequence's rows stand: packed rows `first` … `first + count` − 1, at positions `start` … `end` − 1.

    `slots` reads as many positions as attention needs, which may be more than `end`.
    """

    first: int
    start: int
    end: int
    slots: slice | torch.Tensor

    @property
    def count(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Part:
    """Query rows that one attention call takes: `first` … `last` − 1 of the pack, padded by `missing`, over `length`
    positions. `mask` [T, L] is added to the scores; None where every row sees every position.
    """

    first: int
    last: int
    missing: int
    length: int
    mask: torch.Tensor | None


@dataclass(slots=True)
class Pack:
    """One forward's layout; built once, read by every layer. `parts` are shared by layers with the same window."""

    sequences: list[SequenceRows]
    write_slots: torch.Tensor  # of the rows that are not padding
    cache: "KVCache"
    calls: dict[int, int] = field(default_factory=dict)
    _parts: dict[tuple[int, int | None], list[Part]] = field(default_factory=dict)

    def parts(self, index: int, window: int | None) -> list[Part]:
        key = (index, window)
        if key not in self._parts:
            self._parts[key] = _split(self.sequences[index], window, self.cache)
        return self._parts[key]


class KVCache:
    """Keys and values of all layers: [num_slots, G, D] each; a little longer where lengths are padded."""

    def __init__(
        self, num_layers: int, num_slots: int, heads: int, head_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.fixed_shapes = device.type == "cpu" and dtype != torch.float64
        self.dtype = cache_dtype(dtype, device)
        self.device = device
        shape = (num_slots + (LENGTH_STEP if self.fixed_shapes else 0), heads, head_size)
        self.keys = [_zeros(shape, self.dtype, device) for _ in range(num_layers)]
        self.values = [_zeros(shape, self.dtype, device) for _ in range(num_layers)]

    def read_len(self, end: int) -> int:
        """How many positions attention reads for a sequence of `end`."""
        return -(-end // LENGTH_STEP) * LENGTH_STEP if self.fixed_shapes else end


def _zeros(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not garbage: a masked position must be finite to count for nothing.

    On a CPU the memory is taken from the system page by page as it is written; torch's own zeros would take it all.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape, dtype=np.float64 if dtype == torch.float64 else np.float32))


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What keys and values are kept in."""
    return torch.float32 if device.type == "cpu" and dtype.itemsize < 4 else dtype


def pack_rows(slices: Sequence[Slice], block_tokens: int, cache: KVCache) -> Pack:
    """Lay out the rows of all slices one after another."""
    sequences, write_slots, first = [], list[int](), 0
    for s in slices:
        write_slots.extend(
            s.block_ids[position // block_tokens] * block_tokens + position % block_tokens
            for position in range(s.start, s.end)
        )
        sequences.append(SequenceRows(first, s.start, s.end, _read_slots(s.block_ids, s.end, block_tokens, cache)))
        first += s.end - s.start
    write_index = torch.tensor(write_slots, dtype=torch.long, device=cache.device)
    return Pack(sequences, write_index, cache)


def paged_attention(
    pack: Pack,
    layer: int,
    query: torch.Tensor,  # [R, H, D]
    key: torch.Tensor,  # [R, G, D]
    value: torch.Tensor,  # [R, G, D]
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Store the rows' keys and values, then attend each sequence's rows to its own positions; [R, H, D]."""
    pack.calls[layer] = pack.calls.get(layer, 0) + 1
    cache = pack.cache
    keys, values = cache.keys[layer], cache.values[layer]
    num_rows = pack.write_slots.shape[0]
    keys[pack.write_slots] = key[:num_rows].to(cache.dtype)
    values[pack.write_slots] = value[:num_rows].to(cache.dtype)
    out = torch.zeros_like(query)
    for index, rows in enumerate(pack.sequences):
        read_keys, read_values = (kv[rows.slots].transpose(0, 1)[None] for kv in (keys, values))
        for part in pack.parts(index, window):
            queries = query[part.first : part.last].transpose(0, 1)[None].to(cache.dtype)
            attended = scaled_dot_product_attention(
                pad(queries, (0, 0, 0, part.missing)) if part.missing else queries,
                read_keys[:, :, : part.length],
                read_values[:, :, : part.length],
                attn_mask=part.mask,
                scale=scaling,
                enable_gqa=True,
            )
            out[part.first : part.last] = attended[0, :, : part.last - part.first].transpose(0, 1)
    return out


def _split(rows: SequenceRows, window: int | None, cache: KVCache) -> list[Part]:
    """The attention calls of one sequence's rows."""
    if not cache.fixed_shapes:
        sees_all = rows.count == 1 and (window is None or rows.end <= window)
        mask = None if sees_all else _mask(rows.start, rows.count, rows.end, window, cache)
        return [Part(rows.first, rows.first + rows.count, 0, rows.end, mask)]
    parts = []
    for start in range(rows.start, rows.end, MOST_QUERIES):
        end = min(rows.end, start + MOST_QUERIES)
        missing, length = max(0, LEAST_QUERIES - (end - start)), cache.read_len(end)
        mask = _mask(start, end - start + missing, length, window, cache)
        first = rows.first + start - rows.start
        parts.append(Part(first, first + end - start, missing, length, mask))
    return parts


def _mask(start: int, count: int, length: int, window: int | None, cache: KVCache) -> torch.Tensor:
    """[count, length]: 0 where the row at `start` + i may look (itself, earlier ones, within the window), else −∞."""
    rows = torch.arange(start, start + count, device=cache.device)[:, None]
    positions = torch.arange(length, device=cache.device)[None, :]
    seen = positions <= rows
    if window is not None:
        seen &= positions > rows - window
    return torch.zeros(count, length, dtype=cache.dtype, device=cache.device).masked_fill_(~seen, -torch.inf)


def _read_slots(block_ids: Sequence[int], end: int, block_tokens: int, cache: KVCache) -> slice | torch.Tensor:
    """What reads positions below `end` and, where lengths are padded, any slots after them.

    A slice where the blocks follow one another, so that reading them copies nothing.
    """
    length, blocks = cache.read_len(end), list(block_ids[: -(-end // block_tokens)])
    if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
        first = blocks[0] * block_tokens
        return slice(first, first + length)
    starts = torch.tensor(blocks, dtype=torch.long, device=cache.device) * block_tokens
    slots = (starts[:, None] + torch.arange(block_tokens, device=cache.device)).flatten()[:end]
    return pad(slots, (0, length - end))
