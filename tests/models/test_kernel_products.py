"""Products of our own kernels: close to the full ones, and exactly the codes' own arithmetic."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from kvstate.protocol import Sampling
from models.backend import Slice
from models.kernel_products import BfloatProduct, Int4Product, Int8Product
from models.kernels.simd import has_feature
from models.transformers_backend import TransformersBackend, UnsupportedModel
from tests.models.test_transformers_backend import SIZES, save

LARGEST = {Int8Product: 0.02, Int4Product: 0.15}


@pytest.mark.parametrize("kind", [Int8Product, Int4Product])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_product_is_near_the_full_one(
    kind: type[Int8Product] | type[Int4Product], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(48, 64), torch.randn(48), torch.randn(5, 64)
    got = kind(weight.to(dtype), bias.to(dtype))(x)
    full = x @ weight.T + bias
    assert float((got - full).std() / full.std()) < LARGEST[kind]


@pytest.mark.skipif(not has_feature("avx512bf16"), reason="this processor has no dot products of bfloat16")
def test_bfloat_products_are_torchs_but_for_rounding() -> None:
    torch.manual_seed(0)
    for outputs, inputs, rows in ((48, 64, 1), (7, 8, 4), (33, 1536, 9)):
        weight, bias, x = (torch.randn(*sizes).bfloat16() for sizes in ((outputs, inputs), (outputs,), (rows, inputs)))
        exact = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(BfloatProduct(weight, bias)(x).double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(not has_feature("avx512bf16"), reason="this processor has no dot products of bfloat16")
def test_a_row_of_bfloats_has_the_same_bits_in_any_block() -> None:
    """Sums whose second half takes back the first leave nothing but rounding, which tells orders of addition apart."""
    torch.manual_seed(2)
    weight, x = torch.randn(64, 768).bfloat16(), torch.randn(70, 768).bfloat16()
    weight, x = torch.cat((weight, -weight.flip(1)), dim=1), torch.cat((x, x.flip(1)), dim=1)
    product = BfloatProduct(weight)
    whole = product(x)
    assert whole.abs().max() > 0
    for size in (1, 2, 3, 4, 5, 7, 8, 9, 33):
        assert torch.equal(product(x[:size]), whole[:size]), size
        assert torch.equal(product(x[-size:]), whole[-size:]), size


@pytest.mark.parametrize("kind", [Int8Product, Int4Product])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 40), (7, 32), (33, 100)])
def test_sizes_need_not_be_whole_groups(kind: type[Int8Product] | type[Int4Product], outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(outputs, inputs), torch.randn(6, inputs)
    got, full = kind(weight)(x), x @ weight.T
    assert got.shape == full.shape
    assert float((got - full).std() / full.std()) < LARGEST[kind]


def test_weights_on_the_grid_are_kept_exactly() -> None:
    """Codes 0 … 15 in steps of a power of two, each group with both ends, are what int4 can say."""
    codes = torch.randint(0, 16, (16, 64), generator=torch.Generator().manual_seed(1)).float()
    codes[:, [0, 32]], codes[:, [1, 33]] = 0.0, 15.0
    weight = (codes - 8.0) * 0.25
    assert torch.equal(Int4Product(weight)(torch.eye(64)).T, weight)
    whole = torch.randint(-127, 128, (16, 64), generator=torch.Generator().manual_seed(1)).float()
    whole[:, 0] = 127.0
    assert torch.equal(Int8Product(whole * 0.5)(torch.eye(64)).T, whole * 0.5)


@pytest.mark.parametrize("kind", [Int8Product, Int4Product])
@pytest.mark.parametrize("inputs", [576, 1536])
def test_a_row_has_the_same_bits_in_any_block(kind: type[Int8Product] | type[Int4Product], inputs: int) -> None:
    torch.manual_seed(2)
    product = kind(torch.randn(576, inputs).bfloat16())
    x = torch.randn(100, inputs)
    whole = product(x)
    for size in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 64):
        assert torch.equal(product(x[:size]), whole[:size]), size


OTHER_PROCESSOR = """
import sys, torch
from models.kernel_products import BfloatProduct, Int4Product, Int8Product
from models.kernels.simd import has_feature
torch.manual_seed(3)
weight, x = torch.randn(48, 96), torch.randn(5, 96)
torch.save([kind(weight)(x) for kind in (Int8Product, Int4Product)], sys.argv[1])
"""


@pytest.mark.skipif(not has_feature("avx2"), reason="compiled for a kind of processor that this is not")
def test_a_processor_without_byte_dots_gives_the_same_bits(tmp_path: Path) -> None:
    """Compiled for one with AVX2 alone."""
    made = []
    for name, settings in {
        "here": {},
        "there": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma"},
    }.items():
        env = os.environ | settings | {"NUMBA_CACHE_DIR": str(tmp_path / name)}
        command = [sys.executable, "-c", OTHER_PROCESSOR, str(tmp_path / f"{name}.pt")]
        subprocess.run(command, env=env, check=True, timeout=300)
        made.append(torch.load(tmp_path / f"{name}.pt", weights_only=True))
    assert all(torch.equal(here, there) for here, there in zip(*made, strict=True))


def load(folder: Path, quantization: str, dtype: torch.dtype = torch.bfloat16) -> TransformersBackend:
    return TransformersBackend(
        folder, dtype=dtype, device="cpu", num_blocks=lambda: 32, block_tokens=16, quantization=quantization
    )


def test_a_quantized_model_agrees_mostly_with_the_full_one(tmp_path: Path) -> None:
    save(tmp_path, transformers.LlamaConfig(**SIZES))
    text = torch.randint(0, 128, (120,), generator=torch.Generator().manual_seed(3)).tolist()
    rows = Slice(text, 0, 120, 0, 120, list(range(15)), Sampling())
    only_kv = Slice(text, 0, 70, 70, 120, list(range(15)), Sampling())
    backends = [load(tmp_path, q) for q in ("none", "int8", "int4")]
    assert [backend.forward([only_kv]) for backend in backends] == [[[]]] * 3
    full, int8, int4 = (backend.forward([rows])[0] for backend in backends)
    agreeing = [sum(a == b for a, b in zip(full, other, strict=True)) for other in (int8, int4)]
    assert 120 >= agreeing[0] > agreeing[1] > 20  # random weights have narrow margins; chance would be 1


def test_what_cannot_be_quantized_is_named(tmp_path: Path) -> None:
    save(tmp_path / "llama", transformers.LlamaConfig(**SIZES))
    with pytest.raises(UnsupportedModel, match="needs dtype float32, bfloat16 or float16"):
        load(tmp_path / "llama", "int8", torch.float64)
    save(tmp_path / "gpt2", transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64))
    with pytest.raises(UnsupportedModel, match="does not keep its layers"):
        load(tmp_path / "gpt2", "int8")


@pytest.mark.parametrize("config", [transformers.GemmaConfig, transformers.PhiConfig])
def test_models_of_other_architectures_are_quantized_too(
    config: Callable[..., transformers.PreTrainedConfig], tmp_path: Path
) -> None:
    save(tmp_path, config(**SIZES))
    text = torch.randint(0, 128, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    rows = Slice(text, 0, 60, 0, 60, list(range(8)), Sampling())
    backends = [load(tmp_path, quantization) for quantization in ("none", "int8")]
    assert not any(backend.is_lean for backend in backends)
    full, int8 = (backend.forward([rows])[0] for backend in backends)
    assert sum(a == b for a, b in zip(full, int8, strict=True)) > 30
