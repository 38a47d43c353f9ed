"""Keys and values in paged blocks, and attention over them for packed rows of many sequences.

Letters: R packed rows, S sequences, H query heads, G key/value heads, D head size, T positions of a block. Position p
of a sequence lives in its block table's entry p // T, at offset p % T. Who may use which block is decided elsewhere
(kvstate/allocator.py); rolling back is only a shorter length: what lies behind it is never read, and overwritten later.

`KVCache` is for CPUs: float32, whatever the model has, and a row's attention is computed by itself, so that it has the
same bits whatever rows are computed with it. `TorchKVCache` is for everything else: other devices and float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from models.backend import Move, Slice
from models.kernels.attention import TILE, attend, make_units, move_rows, store_rows

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(slots=True)
class Pack:
    """One forward's layout: rows `firsts[s]` … `firsts[s + 1]` − 1 are of sequence s, whose blocks are `tables[s]`.

    positions [R] · firsts [S + 1] · tables [S, most blocks] · `calls`: how often each layer's attention ran
    also [C, 3]: (row, block, offset), where rows are stored besides their own places
    """

    positions: Ids
    firsts: Ids
    tables: Ids
    also: Ids
    calls: dict[int, int] = field(default_factory=dict)


def pack_rows(slices: Sequence[Slice]) -> Pack:
    """Lay out the rows of all slices one after another; positions count from where the model reads a sequence."""
    tables = np.zeros((len(slices), max(len(s.block_ids) for s in slices)), np.int64)
    for table, s in zip(tables, slices, strict=True):
        table[: len(s.block_ids)] = s.block_ids
    positions = np.concatenate([np.arange(s.start - s.first, s.end - s.first, dtype=np.int64) for s in slices])
    firsts = np.cumsum([0, *(s.end - s.start for s in slices)], dtype=np.int64)
    also = [(first + p - s.start, b, o) for s, first in zip(slices, firsts, strict=False) for p, b, o in s.also]
    return Pack(positions, firsts, tables, np.array(also, np.int64).reshape(-1, 3))


@dataclass(frozen=True, slots=True)
class States:
    """What a layer attends with: query [R, H, D], key and value [R, G, D]. `window`: how many positions a row sees."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    window: int | None


class KVCache:
    """On a CPU, in float32: keys and values as models/kernels/attention.py wants them, one array per layer.

    Memory is taken from the system page by page as it is written. Head size and block must be multiples of TILE.
    """

    itemsize = 4

    def __init__(self, num_layers: int, num_blocks: int, block_tokens: int, heads: int, head_size: int) -> None:
        assert block_tokens % TILE == 0 == head_size % TILE, "see `uses_kernels`"
        keys, values = (heads, block_tokens // TILE, head_size * TILE), (heads, block_tokens, head_size)
        self.keys = [np.zeros((num_blocks, *keys), np.float32) for _ in range(num_layers)]
        self.values = [np.zeros((num_blocks, *values), np.float32) for _ in range(num_layers)]
        self._heads = heads

    def units(self, pack: Pack, num_heads: int) -> Ids:
        """What attention computes at once; the same for every layer."""
        units: Ids = make_units(pack.firsts, self._heads, num_heads // self._heads)
        return units

    def attend(self, pack: Pack, layer: int, states: States) -> torch.Tensor:
        """Store keys and values, then attend each row to its sequence up to itself: [R, H, D]."""
        cache, places = (self.keys[layer], self.values[layer]), (pack.tables, pack.firsts, pack.positions)
        store_rows(_floats(states.key), _floats(states.value), *cache, *places, pack.also)
        out = torch.empty(states.query.shape)
        units, scaling = self.units(pack, states.query.shape[1]), np.float32(states.scaling)
        attend(units, _floats(states.query), *cache, *places, scaling, states.window or 0, out.numpy())
        return out.to(states.query.dtype)

    def move(self, moves: Sequence[Move]) -> None:
        """See `Backend.move`."""
        for keys, values in zip(self.keys, self.values, strict=True):
            move_rows(keys, values, np.array(moves, np.int64))


class TorchKVCache:
    """Per layer keys and values [slots, G, D], a slot being one position's place: block · T + offset."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_tokens: int,
        heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks * block_tokens, heads, head_size)
        self._block_tokens = block_tokens
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._slots: tuple[Pack, list[torch.Tensor], torch.Tensor] | None = None

    def attend(self, pack: Pack, layer: int, states: States) -> torch.Tensor:
        """As `KVCache.attend`."""
        keys, values = self._keys[layer], self._values[layer]
        read_slots, write_slots = self.slots(pack)
        keys[write_slots] = states.key.to(keys.dtype)
        values[write_slots] = states.value.to(keys.dtype)
        if len(pack.also):
            rows, blocks, offsets = torch.from_numpy(pack.also).to(keys.device).unbind(1)
            keys[blocks * self._block_tokens + offsets] = states.key[rows].to(keys.dtype)
            values[blocks * self._block_tokens + offsets] = states.value[rows].to(keys.dtype)
        out = torch.empty_like(states.query)
        for slots, first, last in zip(read_slots, pack.firsts, pack.firsts[1:], strict=False):
            rows = states.query[first:last].transpose(0, 1)[None].to(keys.dtype)
            read_keys, read_values = (kv[slots].transpose(0, 1)[None] for kv in (keys, values))
            mask = _mask(last - first, len(slots), states.window, keys.device)
            attended = scaled_dot_product_attention(
                rows, read_keys, read_values, attn_mask=mask, scale=states.scaling, enable_gqa=True
            )
            out[first:last] = attended[0].transpose(0, 1)
        return out

    def move(self, moves: Sequence[Move]) -> None:
        """See `Backend.move`."""
        old, new = (
            torch.tensor([block * self._block_tokens + offset for block, offset in places])
            for places in zip(*(((m.from_block, m.from_offset), (m.to_block, m.to_offset)) for m in moves), strict=True)
        )
        for cache in (*self._keys, *self._values):
            cache[new] = cache[old]

    def slots(self, pack: Pack) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(where each sequence is read, up to its last row; where all rows are written); the same for every layer."""
        if self._slots is None or self._slots[0] is not pack:
            device, size = self._keys[0].device, self._block_tokens
            reads, written = [], []
            for table, first, last in zip(pack.tables, pack.firsts, pack.firsts[1:], strict=False):
                positions = np.arange(pack.positions[last - 1] + 1)
                reads.append(torch.from_numpy(table[positions // size] * size + positions % size).to(device))
                written.append(reads[-1][first - last :])
            self._slots = (pack, reads, torch.cat(written))
        return self._slots[1:]


AnyCache = KVCache | TorchKVCache


def make_cache(
    num_layers: int,
    num_blocks: int,
    block_tokens: int,
    heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AnyCache:
    """The kind that fits the model."""
    sizes = (num_layers, num_blocks, block_tokens, heads, head_size)
    fits = uses_kernels(block_tokens, head_size, dtype, device)
    return KVCache(*sizes) if fits else TorchKVCache(*sizes, dtype, device)


def uses_kernels(block_tokens: int, head_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `KVCache` can hold it."""
    return device.type == "cpu" and dtype != torch.float64 and head_size % TILE == 0 == block_tokens % TILE


def _floats(states: torch.Tensor) -> Floats:
    array: Floats = states.float().contiguous().numpy()
    return array


def _mask(rows: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[rows, length], true where a row may look: itself, earlier positions, within the window."""
    at = torch.arange(length - rows, length, device=device)[:, None]
    positions = torch.arange(length, device=device)[None, :]
    seen = positions <= at
    return seen if window is None else seen & (positions > at - window)
