"""Attention of packed rows of many sequences over a paged cache, as an attention function of transformers.

A forward gets its rows as one sequence [1, R]; the keyword `paged=PagedRows` travels through the model to `paged_attention`,
which stores the new keys and values and lets each sequence's rows attend to that sequence's positions alone.

Letters: R packed rows, padding included; T rows that are real; S spans; H heads, Hkv key/value heads, D head size.

*Row invariance.* On the CPU in float32 the kernels give a row the same bits whatever else is in the batch, if queries come in
fours or more and the key length is a multiple of 512, the kernel's own chunk (docs/noise.md says why bits matter): so
spans are padded to that under a mask where `steady` is set.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch.nn.functional import pad, scaled_dot_product_attention

from models.backend import Slice
from models.kv_cache import KvCache, run_start, slots_of

NAME = "specrelay_paged"
LEAST_ROWS = 4
_KEY_CHUNK = 512
_HARMLESS = frozenset({"position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict"})
"""Keywords that models hand on and that do not change what attention computes here."""


class UnsupportedModel(Exception):
    """The model cannot be served by this backend: why, in one line."""


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence: `first_row` … `end_row` − 1, at positions `start` … `end` − 1, reading `keys_at`."""

    first_row: int
    end_row: int
    start: int
    end: int
    keys_at: slice | torch.Tensor
    num_keys: int
    padded_rows: int


@dataclass(slots=True)
class PagedRows:
    """One forward. `calls` counts attention calls per layer; masks are built once for all layers with the same window."""

    cache: KvCache | None
    slots: torch.Tensor
    spans: Sequence[Span]
    device: torch.device
    calls: dict[int, int] = field(default_factory=dict)
    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    masks: dict[int | None, list[torch.Tensor | None]] = field(default_factory=dict)

    def masks_for(self, window: int | None) -> list[torch.Tensor | None]:
        if window not in self.masks:
            self.masks[window] = [_mask(span, window, self.device) for span in self.spans]
        return self.masks[window]


def plan_rows(slices: Sequence[Slice], cache: KvCache, steady: bool, device: torch.device) -> PagedRows:
    """Where each row of the forward is stored and what it reads."""
    slots: list[int] = []
    spans: list[Span] = []
    for one in slices:
        first_row = len(slots)
        slots += slots_of(one.block_ids, one.start, one.end, cache.block_tokens)
        num_rows = len(slots) - first_row
        num_keys = -(-one.end // _KEY_CHUNK) * _KEY_CHUNK if steady else one.end
        padded_rows = max(num_rows, LEAST_ROWS) if steady else num_rows
        keys_at = _keys_at(one, num_keys, cache, device)
        spans.append(Span(first_row, len(slots), one.start, one.end, keys_at, num_keys, padded_rows))
    return PagedRows(cache, torch.tensor(slots, dtype=torch.int64, device=device), spans, device)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedRows,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, R, D], key and value [1, Hkv, R, D], positions already in them → [1, R, H, D].

    UnsupportedModel for a keyword that would change the result, so that no model is served with other mathematics than its own.
    """
    unknown = sorted(name for name, given in others.items() if given is not None and name not in _HARMLESS)
    if unknown or attention_mask is not None or dropout or is_causal is False:
        raise UnsupportedModel(f"its attention needs {', '.join(unknown) or 'a mask of its own'}, which is not supported")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    paged.calls[layer] = paged.calls.get(layer, 0) + 1
    paged.shapes[layer] = (key.shape[1], key.shape[3], value.shape[3])
    out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
    if paged.cache is None:  # the probe that finds out the shapes
        return out, None
    num_real = paged.slots.shape[0]
    paged.cache.write(layer, paged.slots, key[0, :, :num_real].transpose(0, 1), value[0, :, :num_real].transpose(0, 1))
    for span, mask in zip(paged.spans, paged.masks_for(sliding_window), strict=True):
        keys, values = paged.cache.read(layer, span.keys_at)
        num_rows = span.end_row - span.first_row
        rows = query[:, :, span.first_row : span.end_row]
        if span.padded_rows > num_rows:
            rows = pad(rows, (0, 0, 0, span.padded_rows - num_rows))
        result = scaled_dot_product_attention(
            rows,
            keys.transpose(0, 1).unsqueeze(0),
            values.transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            scale=scaling,
            enable_gqa=True,
        )
        out[0, span.first_row : span.end_row] = result[0, :, :num_rows].transpose(0, 1)
    return out, None


def _keys_at(one: Slice, num_keys: int, cache: KvCache, device: torch.device) -> slice | torch.Tensor:
    """Slots of the first `num_keys` positions; those past `end` are masked, so any slots do for them."""
    first = run_start(one.block_ids, one.end, cache.block_tokens)
    if first is not None and first + num_keys <= cache.num_slots:
        return slice(first, first + num_keys)
    slots = slots_of(one.block_ids, 0, one.end, cache.block_tokens)
    return torch.tensor(slots + [slots[0]] * (num_keys - one.end), dtype=torch.int64, device=device)


def _mask(span: Span, window: int | None, device: torch.device) -> torch.Tensor | None:
    """[padded rows, keys]: True where a row may look; None where every row sees every key."""
    padded = span.num_keys > span.end or span.padded_rows > span.end_row - span.first_row
    windowed = window is not None and span.end > window
    if span.end - span.start == 1 and not padded and not windowed:
        return None
    rows = torch.arange(span.start, span.start + span.padded_rows, device=device).clamp(max=span.end - 1)[:, None]
    keys = torch.arange(span.num_keys, device=device)[None, :]
    seen = keys <= rows
    return seen & (keys > rows - window) if window is not None else seen


transformers.AttentionInterface.register(NAME, paged_attention)
