"""From a model's config to its backend and the app's tokenizer. Runs in the replica's process; weights are prepared."""

import os
from pathlib import Path

import torch
from transformers import AutoConfig

from cluster.config import AppConfig, Emulate, EmulatedModel, NgramModel, TransformersModel
from models import weights
from models.backend import Backend
from models.emulated import EmulatedBackend, EmulateSpec
from models.ngram import NgramBackend
from models.tokenizer import ByteTokenizer, HubTokenizer, Tokenizer, read_end_ids, read_fingerprint
from models.transformers_backend import TransformersBackend, plan_blocks

EMULATED_BLOCKS = 4096
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def build_backend(config: AppConfig, name: str) -> Backend:
    """The backend of model `name`; loads weights, so call it off the event loop."""
    model = next(m for m in config.models if m.name == name)
    match model:
        case EmulatedModel():
            rank = config.levels[name]
            return EmulatedBackend(name, rank, emulate_spec(model.emulate), EMULATED_BLOCKS, config.kv.block_tokens)
        case NgramModel():
            return _ngram(config)
        case TransformersModel():
            return _transformers(config, model)


def build_tokenizer(config: AppConfig) -> Tokenizer:
    """The target's tokenizer; bytes where the target is emulated."""
    target = config.target
    if not isinstance(target, TransformersModel):
        return ByteTokenizer()
    return HubTokenizer(_folder(target), target.trust_remote_code)


def context_len(config: AppConfig) -> int:
    """Most tokens of prompt and output together: the target's context."""
    target = config.target
    if isinstance(target, EmulatedModel):
        return target.emulate.context_len
    assert isinstance(target, TransformersModel), "config refuses an n-gram target"
    text = AutoConfig.from_pretrained(_folder(target)).get_text_config(decoder=True)
    return int(text.max_position_embeddings)


def emulate_spec(emulate: Emulate) -> EmulateSpec:
    return EmulateSpec(**emulate.model_dump())


def _ngram(config: AppConfig) -> NgramBackend:
    """It drafts for the target, so it shares the target's vocabulary and context."""
    target = config.target
    if isinstance(target, TransformersModel):
        folder = _folder(target)
        return NgramBackend(read_fingerprint(folder), read_end_ids(folder), context_len(config))
    tokens = EmulatedBackend("ngram", 0, EmulateSpec(base_ms=0.0, agreement=1.0), 1)
    return NgramBackend(tokens.vocabulary, tokens.end_ids, context_len(config))


def _transformers(config: AppConfig, model: TransformersModel) -> TransformersBackend:
    torch.set_num_threads(model.threads or len(os.sched_getaffinity(0)))
    folder = _folder(model)
    device = _device(model)
    dtype = _dtype(model, device)
    shape = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    num_blocks = plan_blocks(
        shape,
        num_layers=model.layers or shape.get_text_config(decoder=True).num_hidden_layers,
        dtype_bytes=dtype.itemsize,
        block_tokens=config.kv.block_tokens,
        kv_bytes=config.kv.bytes,
        free_bytes=_free_bytes(device),
        memory_fraction=config.kv.memory_fraction,
    )
    return TransformersBackend(
        folder,
        dtype=dtype,
        device=device,
        num_blocks=num_blocks,
        block_tokens=config.kv.block_tokens,
        layers=model.layers,
        trust_remote_code=model.trust_remote_code,
    )


def _folder(model: TransformersModel) -> Path:
    return weights.prepare(model.source, model.revision, model.trust_remote_code)


def _device(model: TransformersModel) -> str:
    if model.device != "auto":
        return model.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(model: TransformersModel, device: str) -> torch.dtype:
    """auto: bfloat16 where the hardware multiplies it natively, else float32 (contracts.md §2)."""
    if model.dtype != "auto":
        return DTYPES[model.dtype]
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float32
    capability = torch.backends.cpu.get_cpu_capability()
    has_bf16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else False
    return torch.bfloat16 if has_bf16 and capability.startswith("AVX512") else torch.float32


def _free_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
