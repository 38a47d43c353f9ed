"""The forward of Llama-like decoders for packed rows: fused projections, products with fixed row counts, our attention.

Serves the architectures whose layers are RMS norm, attention with rotary positions, RMS norm and a gated MLP; for all
others `lean_decoder` returns None, and the model's own code runs. models/transformers_backend.py compares both at load.
Letters: R rows, C hidden size, H query heads, G key/value heads, D head size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.linalg import vector_norm
from torch.nn.functional import embedding, silu
from transformers import PreTrainedModel

from models.products import Product
from models.quantized import Int4Product, Int8Product

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
AnyProduct = Product | Int8Product | Int4Product
PRODUCTS: dict[str, type[AnyProduct]] = {"none": Product, "int8": Int8Product, "int4": Int4Product}
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float, int | None], torch.Tensor]
"""(layer, q [R, H, D], k [R, G, D], v [R, G, D], scaling, sliding window) → [R, H, D]; stores k and v."""


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm over the last dimension, its scale in float32 or better; torch's own takes more operations."""

    weight: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        norm = vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        scale = norm.square().div_(x.shape[-1]).add_(self.epsilon).rsqrt_()
        normed: torch.Tensor = (x * scale).to(x.dtype) * self.weight
        return normed


@dataclass(frozen=True, slots=True)
class Layer:
    """`head_norms`: of each query and each key head, where the model has them."""

    before_attention: Norm
    qkv: AnyProduct
    head_norms: tuple[Norm, Norm] | None
    out: AnyProduct
    before_mlp: Norm
    gate_up: AnyProduct
    down: AnyProduct
    scaling: float
    window: int | None


class LeanDecoder:
    """Made by `lean_decoder`."""

    def __init__(self, model: PreTrainedModel, heads: int, kv_heads: int, head_size: int, quantization: str) -> None:
        decoder: Any = model.get_decoder()
        self._heads, self._kv_heads, self._head_size = heads, kv_heads, head_size
        self._embedding: torch.Tensor = decoder.embed_tokens.weight
        self._rotary: Any = decoder.rotary_emb
        self._layers = [_layer(layer, quantization) for layer in decoder.layers]
        self._norm = _norm(decoder.norm)
        head: Any = model.get_output_embeddings()
        self._head = PRODUCTS[quantization](head.weight.detach(), head.bias)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attend: Attend) -> torch.Tensor:
        """ids, positions [R]; rows `wanted` [W] → [W, V]."""
        x = embedding(ids, self._embedding)
        cos, sin = self._rotary(x[None], positions[None])
        half = self._head_size // 2
        cos, sin = cos[0, :, None], torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)[:, None]  # [R, 1, D]
        for index, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, x)
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
            x = x + layer.out(attend(index, q, k, v, layer.scaling, layer.window).flatten(1))
            gate, up = layer.gate_up(layer.before_mlp(x)).chunk(2, dim=-1)
            x = x + layer.down(silu(gate) * up)
        return self._head(self._norm(x[wanted]))

    def _qkv(self, layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[R, H, D], [R, G, D], [R, G, D]."""
        rows = layer.qkv(layer.before_attention(x)).view(x.shape[0], -1, self._head_size)
        q, k, v = rows.split((self._heads, self._kv_heads, self._kv_heads), dim=1)
        if layer.head_norms is not None:
            q, k = layer.head_norms[0](q), layer.head_norms[1](k)
        return q, k, v


def lean_decoder(model: PreTrainedModel, quantization: str = "none") -> LeanDecoder | None:
    """None for an architecture that is not known here. `quantization`: a key of PRODUCTS."""
    text = model.config.get_text_config(decoder=True)
    own_code = type(model).__module__.startswith("transformers.")  # and not code that came with the weights
    if not own_code or text.model_type not in MODEL_TYPES or text.hidden_act != "silu":
        return None
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return LeanDecoder(model, text.num_attention_heads, text.num_key_value_heads, head_size, quantization)


def _layer(layer: Any, quantization: str) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    fused = partial(_fused, quantization)
    return Layer(
        before_attention=_norm(layer.input_layernorm),
        qkv=fused(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=(_norm(attention.q_norm), _norm(attention.k_norm)) if hasattr(attention, "q_norm") else None,
        out=fused(attention.o_proj),
        before_mlp=_norm(layer.post_attention_layernorm),
        gate_up=fused(mlp.gate_proj, mlp.up_proj),
        down=fused(mlp.down_proj),
        scaling=float(attention.scaling),
        window=_window(attention),
    )


def _fused(quantization: str, *parts: torch.nn.Linear) -> AnyProduct:
    """One product for several that share their input. The parts' own weights are let go: they become
    views of it, or nothing where it is quantized.
    """
    weight = torch.cat([part.weight.detach() for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts])
    kept = weight if quantization == "none" else weight.new_empty(0, weight.shape[1])
    sizes = [part.weight.shape[0] if quantization == "none" else 0 for part in parts]
    for part, rows in zip(parts, kept.split(sizes), strict=True):
        part.weight = torch.nn.Parameter(rows, requires_grad=False)
    return PRODUCTS[quantization](weight, bias)


def _window(attention: Any) -> int | None:
    """Where a layer does not say, the whole model's."""
    source = attention if hasattr(attention, "sliding_window") else attention.config
    window: int | None = getattr(source, "sliding_window", None)
    return window


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight.detach(), float(getattr(norm, "variance_epsilon", None) or norm.eps))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions of x [R, heads, D]; `sin` has its first half negated."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
