"""Models that run on torch: device, dtype, threads and KV room resolved from the config."""

import math
import os
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedConfig

from cluster.config import AppConfig, TransformersModel
from cluster.preflight import available_cpus
from models.kv_cache import KVCache, uses_kernels
from models.threads import bind_workers
from models.transformers_backend import TransformersBackend, UnsupportedModel, kv_shape, plan_blocks

MEMINFO = Path("/proc/meminfo")
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def build(config: AppConfig, model: TransformersModel, folder: Path, *, on_own_thread: bool) -> TransformersBackend:
    torch.set_num_threads(model.threads or available_cpus())
    if on_own_thread:
        bind_workers()
    device = _device(model)
    dtype = _dtype(model, device)
    check_room(model.name, folder, dtype, _free_bytes(device))
    shape = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    num_blocks = partial(
        _num_blocks,
        config,
        model,
        shape,
        dtype,
        device,
    )
    return TransformersBackend(
        folder,
        dtype=dtype,
        device=device,
        num_blocks=num_blocks,
        block_tokens=config.kv.block_tokens,
        layers=model.layers,
        quantization=model.quantization,
        trust_remote_code=model.trust_remote_code,
    )


def check_room(name: str, folder: Path, dtype: torch.dtype, free_bytes: int) -> None:
    """Raises UnsupportedModel where the weights alone are more than the free memory of the device."""
    num_weights = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            num_weights += sum(math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118
    needed_bytes = num_weights * dtype.itemsize
    if needed_bytes > free_bytes:
        needed, free = (f"{number / 2**30:.2f} GiB" for number in (needed_bytes, free_bytes))
        fix = "give it a node with more, a smaller dtype, or a smaller model"
        raise UnsupportedModel(name, f"its weights need {needed} of memory and {free} are free: {fix}")


def _num_blocks(
    config: AppConfig, model: TransformersModel, shape: PreTrainedConfig, dtype: torch.dtype, device: str
) -> int:
    in_kernels = uses_kernels(config.kv.block_tokens, kv_shape(shape)[1], dtype, torch.device(device))
    return plan_blocks(
        model.name,
        shape,
        num_layers=model.layers or shape.get_text_config(decoder=True).num_hidden_layers,
        dtype_bytes=KVCache.itemsize if in_kernels else dtype.itemsize,
        block_tokens=config.kv.block_tokens,
        kv_bytes=config.kv.bytes,
        free_bytes=_free_bytes(device),
        memory_fraction=config.kv.memory_fraction,
    )


def _device(model: TransformersModel) -> str:
    if model.device != "auto":
        return model.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(model: TransformersModel, device: str) -> torch.dtype:
    """auto: bfloat16 where the hardware multiplies it natively, else float32."""
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
    if MEMINFO.exists():  # what the system would give up counts as free: after a download most memory holds files
        fields = dict(line.split(":", maxsplit=1) for line in MEMINFO.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # macOS does not say what is free
