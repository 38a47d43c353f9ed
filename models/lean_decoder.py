"""The forward of Llama-like decoders on a CPU: kernels of our own, and products of torch or of our own between them.

Serves the architectures whose layers are RMS norm, attention with rotary positions, RMS norm and a gated MLP; for all
others `lean_decoder` returns None, and the model's own code runs. models/transformers_backend.py compares both at load.
Between products all is float32; what they take is `dtype` of theirs.
Letters: R rows, C hidden size, D head size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from models.kernel_products import NOTHING, KernelProduct, Operands, as_array
from models.kernels.elementwise import rms_norm, silu_gate
from models.kernels.layer import add_and_norm, attention_step, whole_layer
from models.kv_cache import KVCache, Pack
from models.linears import AnyProduct, make_product

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Layer:
    """`query_norm` and `key_norm` [D] are empty where heads are not normed; `window` is 0 where a row sees all;
    `operands` are those of the products in this order, where all are kernels.
    """

    before_attention: Floats
    qkv: AnyProduct
    query_norm: Floats
    key_norm: Floats
    out: AnyProduct
    before_mlp: Floats
    gate_up: AnyProduct
    down: AnyProduct
    scaling: np.float32
    window: int
    operands: tuple[Operands, ...] | None


class LeanDecoder:
    """Made by `lean_decoder`."""

    def __init__(self, model: PreTrainedModel, quantization: str) -> None:
        decoder: Any = model.get_decoder()
        head: Any = model.get_output_embeddings()
        self._embedding: torch.Tensor = decoder.embed_tokens.weight.detach()
        self._rotary: Any = decoder.rotary_emb
        self._layers = [_layer(layer, quantization) for layer in decoder.layers]
        self._norms = [layer.before_attention for layer in self._layers] + [_weight(decoder.norm)]
        self._epsilon = np.float32(getattr(decoder.norm, "variance_epsilon", None) or decoder.norm.eps)
        self._num_heads = int(model.config.get_text_config(decoder=True).num_attention_heads)
        self._head = make_product(quantization, head.weight.detach(), head.bias)

    def logits(self, ids: Sequence[int], pack: Pack, wanted: Sequence[int], cache: KVCache) -> torch.Tensor:
        """Token ids [R]; rows `wanted` [W] → [W, V] float32. Stores keys and values of all rows."""
        x = embedding(torch.tensor(ids), self._embedding).float().numpy()
        normed = self._room(len(x), x.shape[1])
        rms_norm(x, self._norms[0], self._epsilon, as_array(normed))
        turns = self._turns(pack)
        places = (cache.units(pack, self._num_heads), pack.tables, pack.firsts, pack.positions, pack.also)
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._norms[1:], strict=True)):
            kv, limits = (cache.keys[index], cache.values[index]), (layer.scaling, layer.window)
            if layer.operands is not None:
                norms = (layer.query_norm, layer.key_norm, layer.before_mlp, next_norm)
                whole_layer(x, as_array(normed), layer.operands, norms, self._epsilon, turns, kv, places, *limits)
            else:
                attended, gated = (self._room(len(x), product.num_inputs) for product in (layer.out, layer.down))
                head_norms = (layer.query_norm, layer.key_norm, self._epsilon)
                attention_step(
                    as_array(layer.qkv(normed)), *head_norms, *turns, *kv, *places, *limits, as_array(attended)
                )
                add_and_norm(x, as_array(layer.out(attended)), layer.before_mlp, self._epsilon, as_array(normed))
                silu_gate(as_array(layer.gate_up(normed)), as_array(gated))
                add_and_norm(x, as_array(layer.down(gated)), next_norm, self._epsilon, as_array(normed))
        if not wanted:
            return torch.empty(0, len(self._embedding))
        return self._head(normed[torch.tensor(wanted, dtype=torch.long)]).float()

    def _room(self, rows: int, columns: int) -> torch.Tensor:
        """For what products take; torch's own memory, because its kernels count on its alignment."""
        return torch.empty(rows, columns, dtype=self._head.dtype)

    def _turns(self, pack: Pack) -> tuple[Floats, Floats]:
        """Cosines and sines [R, D / 2] of the rows' positions."""
        cos, sin = self._rotary(torch.empty(0), torch.from_numpy(pack.positions)[None])
        half = cos.shape[-1] // 2
        return cos[0, :, :half].contiguous().numpy(), sin[0, :, :half].contiguous().numpy()


def lean_decoder(model: PreTrainedModel, quantization: str = "none") -> LeanDecoder | None:
    """None for an architecture that is not known here. `quantization` as in the config."""
    text = model.config.get_text_config(decoder=True)
    own_code = type(model).__module__.startswith("transformers.")  # and not code that came with the weights
    if not own_code or text.model_type not in MODEL_TYPES or text.hidden_act != "silu":
        return None
    return LeanDecoder(model, quantization)


def _layer(layer: Any, quantization: str) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp

    def fused(*parts: torch.nn.Linear) -> AnyProduct:
        """One product for several that share their input."""
        bias = None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts])
        return make_product(quantization, torch.cat([part.weight.detach() for part in parts]), bias)

    products = (
        fused(attention.q_proj, attention.k_proj, attention.v_proj),
        fused(attention.o_proj),
        fused(mlp.gate_proj, mlp.up_proj),
        fused(mlp.down_proj),
    )
    operands = tuple(p.operands for p in products if isinstance(p, KernelProduct) and p.fills_panels)
    qkv, out, gate_up, down = products
    has_head_norms = hasattr(attention, "q_norm")
    return Layer(
        before_attention=_weight(layer.input_layernorm),
        qkv=qkv,
        query_norm=_weight(attention.q_norm) if has_head_norms else NOTHING,
        key_norm=_weight(attention.k_norm) if has_head_norms else NOTHING,
        out=out,
        before_mlp=_weight(layer.post_attention_layernorm),
        gate_up=gate_up,
        down=down,
        scaling=np.float32(attention.scaling),
        window=_window(attention) or 0,
        operands=operands if len(operands) == len(products) else None,
    )


def _window(attention: Any) -> int | None:
    """Where a layer does not say, the whole model's."""
    source = attention if hasattr(attention, "sliding_window") else attention.config
    window: int | None = getattr(source, "sliding_window", None)
    return window


def _weight(norm: Any) -> Floats:
    weight: Floats = norm.weight.detach().float().numpy()
    return weight
