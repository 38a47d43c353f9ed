"""Any decoder-only causal LM of transformers as a `Backend`: packed rows of many sequences in one forward.

The model's own code runs unchanged; only its attention function is ours (`AttentionInterface`), which reads and writes
the paged cache. What cannot be rolled back by setting a length, or depends on the other rows of the batch, is refused
when loaded (`UnsupportedModel`).
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numba
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvstate.protocol import Sampling
from models.backend import Move, Slice
from models.kv_cache import AnyCache, KVCache, Pack, States, make_cache, pack_rows
from models.lean_decoder import LeanDecoder, lean_decoder
from models.linears import replace_linears, why_not
from models.processing import Row
from models.sampling import guesses, logprobs, sample, tops
from models.tokenizer import read_end_ids, read_fingerprint

log = logging.getLogger(__name__)

ATTENTION = "specrelay_paged"
PROBE_ROWS = 8
PROBE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.5, torch.float16: 0.1}
"""How much two forwards of the same weights may differ: standard deviation of the difference by that of the logits.

Another function gives about the square root of 2. Rounding gives far less, but it adds up through bfloat16 layers, and
the general forward norms in float32 even where the rest is float64.
"""
NEUTRAL_KEYWORDS = frozenset(
    {"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions"}
)


class UnsupportedModel(Exception):
    """The model cannot be served exactly."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(model, reason)
        self.model, self.reason = model, reason

    def __str__(self) -> str:
        return f"{self.model}: {self.reason}"


class TransformersBackend:
    """`layers`: keep only the first K decoder layers (early exit). `num_blocks` says how many
    blocks of KV to reserve; it is asked once the weights are loaded, when free memory is known.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: str,
        num_blocks: Callable[[], int],
        block_tokens: int = 16,
        layers: int | None = None,
        quantization: str = "none",
        trust_remote_code: bool = False,
    ) -> None:
        AttentionInterface.register(ATTENTION, _attend)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        _refuse_unservable(folder.name, config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=ATTENTION,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
        model, missing = loaded[0], sorted(loaded[1]["missing_keys"])
        if missing:
            raise UnsupportedModel(folder.name, f"its weights lack {', '.join(missing[:3])}")
        self._model = _shortened(folder.name, model, layers).to(torch.device(device)).eval()  # type: ignore[arg-type]
        self._device = torch.device(device)
        text = config.get_text_config(decoder=True)
        self._num_layers = len(self._model.get_decoder().layers)
        self.num_blocks = num_blocks()
        sizes = (self._num_layers, self.num_blocks, block_tokens, *kv_shape(config))
        self._cache = make_cache(*sizes, dtype, self._device)
        self.vocabulary = read_fingerprint(folder)
        self._vocab_size = int(text.vocab_size)
        self.context_len = int(text.max_position_embeddings)
        self.end_ids = read_end_ids(folder)
        self.block_tokens = block_tokens
        self._kernel_threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        self._lean: LeanDecoder | None = None
        self._probe(folder.name, quantization)

    @property
    def is_lean(self) -> bool:
        """Whether the lean forward runs, and not the model's own."""
        return self._lean is not None

    @torch.inference_mode()
    def forward(self, slices: Sequence[Slice]) -> list[list[int | None]]:
        """See `Backend.forward`. One forward, one sampling pass over all sampled rows."""
        if not slices:
            return []
        numba.set_num_threads(self._kernel_threads)  # numba counts for each calling thread by itself
        pack = pack_rows(slices)
        # An id beyond this vocabulary, from a drafter with a larger one, equals no sample: any row in its place does.
        last_id = self._vocab_size - 1
        ids = [min(token, last_id) for s in slices for token in s.tokens[s.start : s.end]]
        wanted = [
            first + position - s.start
            for s, first in zip(slices, pack.firsts, strict=False)
            for position in range(s.sample_from, s.end)
        ]
        logits = self._logits(ids, wanted, pack)
        rows = [
            Row(position + 1, s.sampling, s.tokens, s.prompt_len)
            for s in slices
            for position in range(s.sample_from, s.end)
        ]
        tokens = sample(logits, rows)
        first, samples = 0, list[list[int | None]]()
        for s in slices:
            last = first + s.end - s.sample_from
            samples.append([*tokens[first:last]])
            if s.logprobs is not None:
                s.logprobs.rows.extend(logprobs(logits[first:last], tokens[first:last], s.logprobs.num_top))
            if s.tops is not None:
                s.tops.rows.extend(tops(logits[first:last], rows[first:last], s.tops.num_top))
            if s.guesses is not None:
                num_guesses = s.guesses.num_guesses
                s.guesses.rows.extend(guesses(logits[first:last], rows[first:last], tokens[first:last], num_guesses))
            first = last
        return samples

    def move(self, moves: Sequence[Move]) -> None:
        """See `Backend.move`."""
        if moves:
            self._cache.move(moves)

    def _logits(self, ids: list[int], wanted: list[int], pack: Pack) -> torch.Tensor:
        """[len(wanted), V]."""
        if self._lean is not None:
            assert isinstance(self._cache, KVCache), "the lean forward has kernels of its own"
            return self._lean.logits(ids, pack, wanted, self._cache)
        rows, places, kept = self._tensors(ids, pack.positions.tolist(), wanted)
        output = self._model(
            input_ids=rows[None],
            position_ids=places[None],
            use_cache=False,
            logits_to_keep=kept,
            pack=pack,
            paged=self._cache,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _tensors(self, *numbers: list[int]) -> Iterator[torch.Tensor]:
        return (torch.tensor(each, dtype=torch.long, device=self._device) for each in numbers)

    @torch.inference_mode()
    def _probe(self, name: str, quantization: str) -> None:
        """Every layer must have called our attention exactly once, else a mixer of another kind is inside.

        On a CPU the products are then replaced by kernels, or the whole forward by the lean one, if that gives the
        same logits to the rounding of the model's own numbers.
        """
        pack, general = self._probed()
        if pack.calls != dict.fromkeys(range(self._num_layers), 1):
            raise UnsupportedModel(name, "not every layer runs attention exactly once, so its state cannot roll back")
        inside = [m.weight for m in self._model.get_decoder().modules() if isinstance(m, torch.nn.Linear)]
        reason = why_not(quantization, inside)
        if reason is None and isinstance(self._cache, KVCache):
            self._use_kernels(name, quantization, general)
        elif quantization != "none":
            blocks = "needs kv.block_tokens and a head size in multiples of 16"
            raise UnsupportedModel(name, reason or f"quantization: {quantization} {blocks}")

    def _use_kernels(self, name: str, quantization: str, general: torch.Tensor) -> None:
        """The lean forward where there is one for the architecture, else the model's own with the kernels' products.

        Unquantized it must give the `general` logits, to the rounding of the model's numbers.
        """
        self._lean = lean_decoder(self._model, quantization)
        if self._lean is not None and quantization == "none":
            _, lean = self._probed()
            difference = float((lean.double() - general.double()).std() / (general.double().std() + 1e-9))
            if difference > PROBE_TOLERANCE[general.dtype]:
                log.warning("%s: its own forward is used, the lean one differs by %.2g", name, difference)
                self._lean = None
        if self._lean is None:
            replace_linears(self._model, quantization)
        else:
            del self._model  # its weights are in the lean one's panels

    def _probed(self) -> tuple[Pack, torch.Tensor]:
        """Logits after tokens from all over the vocabulary; its first ones are often special, and round badly."""
        tokens = [self._vocab_size * (2 * i + 1) // (2 * PROBE_ROWS) for i in range(PROBE_ROWS)]
        blocks = list(range(-(-PROBE_ROWS // self.block_tokens)))
        pack = pack_rows([Slice(tokens, 0, PROBE_ROWS, 0, PROBE_ROWS, blocks, Sampling())])
        return pack, self._logits(tokens, list(range(PROBE_ROWS)), pack)


def kv_shape(config: PreTrainedConfig) -> tuple[int, int]:
    """(key/value heads, head size)."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(heads), int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def plan_blocks(
    name: str,
    config: PreTrainedConfig,
    *,
    num_layers: int,
    dtype_bytes: int,
    block_tokens: int,
    kv_bytes: int | None,
    free_bytes: int,
    memory_fraction: float,
    most_sequences: int = 64,
) -> int:
    """How many KV blocks to reserve: `kv_bytes` if given, else the fraction of free memory, but no more than
    `most_sequences` full contexts could fill. Raises UnsupportedModel where that is not one block.
    """
    text = config.get_text_config(decoder=True)
    heads, head_size = kv_shape(config)
    block_bytes = 2 * num_layers * heads * head_size * dtype_bytes * block_tokens
    useful = most_sequences * -(-int(text.max_position_embeddings) // block_tokens)
    if kv_bytes is not None:
        num_blocks, given = kv_bytes // block_bytes, f"kv.bytes {kv_bytes}"
    else:
        num_blocks = min(useful, int(free_bytes * memory_fraction) // block_bytes)
        given = f"kv.memory_fraction {memory_fraction:g} of {free_bytes} free bytes"
    if num_blocks < 1:
        raise UnsupportedModel(name, f"{given} hold no block of {block_tokens} tokens, which takes {block_bytes} bytes")
    return int(num_blocks)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    pack: Pack,
    paged: AnyCache,
    sliding_window: int | None = None,
    **keywords: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer. The mask is ours alone: `pack` knows which rows belong together."""
    del attention_mask
    changing = {name for name, value in keywords.items() if value is not None and name not in NEUTRAL_KEYWORDS}
    if changing:
        names = ", ".join(sorted(changing))
        raise UnsupportedModel(type(module).__name__, f"its attention is changed by {names}, which is not supported")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    pack.calls[layer] = pack.calls.get(layer, 0) + 1
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    return paged.attend(pack, layer, States(q, k, v, scaling, sliding_window))[None], None


def _refuse_unservable(name: str, config: PreTrainedConfig) -> None:
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = {rope.get("rope_type")} | {v.get("rope_type") for v in rope.values() if isinstance(v, dict)}
    if kinds & {"dynamic", "longrope"}:
        raise UnsupportedModel(name, "its rotary positions depend on the longest sequence of a batch")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(name, "it is not a decoder-only model")


def _shortened(name: str, model: PreTrainedModel, layers: int | None) -> PreTrainedModel:
    """The model with its first `layers` decoder layers; its norm and head stay."""
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(name, "its architecture does not let its attention be replaced")
    decoder = model.get_decoder()
    if not hasattr(decoder, "layers"):
        raise UnsupportedModel(name, "its decoder does not keep its layers as a list named `layers`")
    if layers is None:
        return model
    if not 1 <= layers <= len(decoder.layers):
        raise UnsupportedModel(name, f"layers: {layers} is not within its {len(decoder.layers)} layers")
    decoder.layers = decoder.layers[:layers]
    decoder.config.num_hidden_layers = layers
    return model
