"""Weight-only quantized products on a CPU, made from full weights at load (models/kernels/integer.py).

int8: one scale per output, symmetric. int4: a scale and an offset per output and 32 inputs, asymmetric. Rows are
quantized to bytes in groups of 32 as they come. A row has the same bits whatever rows are computed with it, so no
padding is needed (models/products.py), and many rows take the same kernel as few.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models.kernels.integer import GROUP, multiply_int4, multiply_int8
from models.kernels.simd import LANES
from models.products import Product

Floats = npt.NDArray[np.float32]
Operands = tuple[npt.NDArray[np.uint8], npt.NDArray[Any], Floats]


class _IntegerProduct:
    """x [R, K] float32 → x · weightᵀ (+ bias), float32 [R, N]. `codes` and `steps` as the kernel wants them."""

    dtype = torch.float32

    def __init__(
        self, kernel: Any, codes: npt.NDArray[np.uint8], steps: npt.NDArray[Any], weight: torch.Tensor, bias: Any
    ) -> None:
        self._kernel, self._codes, self._steps = kernel, codes, steps
        self._num_outputs, self.num_inputs = weight.shape
        self._bias = None if bias is None else bias.float()

    @property
    def operands(self) -> Operands | None:
        """For a kernel that multiplies itself: codes, steps and bias, empty for none; if outputs fill whole panels."""
        if self._num_outputs % LANES:
            return None
        return self._codes, self._steps, np.empty(0, np.float32) if self._bias is None else self._bias.numpy()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), len(self._codes) * LANES)
        self._kernel(x.contiguous().numpy(), self._codes, self._steps, out.numpy())
        if self._num_outputs != out.shape[1]:
            out = out[:, : self._num_outputs].contiguous()
        return out if self._bias is None else out.add_(self._bias)


class Int8Product(_IntegerProduct):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        groups = _grouped(weight)
        steps = np.maximum(np.abs(groups).max(axis=(1, 2)) / np.float32(127.0), np.float32(1e-12))
        codes = (np.rint(groups / steps[:, None, None]) + 128.0).astype(np.uint8)
        panels = codes.reshape(-1, LANES, groups.shape[1], 8, 4).transpose(0, 2, 3, 1, 4)  # [P, G, vector, lane, byte]
        packed = np.ascontiguousarray(panels).reshape(len(panels), -1)
        super().__init__(multiply_int8, packed, steps.reshape(-1, LANES), weight, bias)


class Int4Product(_IntegerProduct):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        groups = _grouped(weight)
        low, high = groups.min(axis=2), groups.max(axis=2)
        # Rounded before the codes are found, so that these make good what rounding took.
        step_bits, low_bits = _bfloats((high - low) / np.float32(15.0)), _bfloats(low)
        steps, lows = _floats(step_bits)[..., None], _floats(low_bits)[..., None]
        codes = np.clip(np.rint((groups - lows) / np.maximum(steps, np.float32(1e-12))), 0, 15).astype(np.uint8)
        parts = codes.reshape(-1, LANES, groups.shape[1], 4, 2, 4)  # [P, lane, G, vector, half, byte]
        panels = (parts[..., 0, :] | (parts[..., 1, :] << 4)).transpose(0, 2, 3, 1, 4)  # [P, G, vector, lane, byte]
        packed = np.ascontiguousarray(panels).reshape(len(panels), -1)
        both = np.stack((step_bits, low_bits), axis=-1).reshape(-1, LANES, groups.shape[1], 2).transpose(0, 2, 3, 1)
        super().__init__(multiply_int4, packed, np.ascontiguousarray(both).reshape(len(panels), -1), weight, bias)


def _grouped(weight: torch.Tensor) -> Floats:
    """[N, G, GROUP], filled up with zeros to whole groups of inputs and whole panels of outputs."""
    outputs, inputs = weight.shape
    full = torch.nn.functional.pad(weight.detach().float(), (0, -inputs % GROUP, 0, -outputs % LANES))
    grouped: Floats = full.numpy().reshape(len(full), -1, GROUP)
    return grouped


def _bfloats(numbers: Floats) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16."""
    bits: npt.NDArray[np.uint16] = torch.from_numpy(numbers).bfloat16().view(torch.uint16).numpy()
    return bits


def _floats(bits: npt.NDArray[np.uint16]) -> Floats:
    numbers: Floats = (bits.astype(np.uint32) << 16).view(np.float32)
    return numbers


AnyProduct = Product | Int8Product | Int4Product
PRODUCTS: dict[str, type[AnyProduct]] = {"none": Product, "int8": Int8Product, "int4": Int4Product}


class ProductLinear(torch.nn.Module):
    """Takes the place of a `torch.nn.Linear` in a model of any architecture."""

    def __init__(self, linear: torch.nn.Linear, quantization: str) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach()
        self._product = PRODUCTS[quantization](linear.weight.detach(), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, K] → […, N]."""
        out = self._product(x.flatten(0, -2).to(self._product.dtype)).to(x.dtype)
        rows: torch.Tensor = out.unflatten(0, x.shape[:-1])
        return rows


def replace_linears(model: torch.nn.Module, quantization: str) -> None:
    """All linear layers, the head's included."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, torch.nn.Linear)
    ]
    for parent, name, child in found:
        setattr(parent, name, ProductLinear(child, quantization))


def why_not(quantization: str, weights: list[torch.Tensor]) -> str | None:
    """Why these weights cannot be quantized so; None if they can."""
    if quantization == "none":
        return None
    if any(weight.device.type != "cpu" for weight in weights):
        return f"quantization: {quantization} runs on CPUs only"
    if any(weight.dtype not in (torch.float32, torch.bfloat16, torch.float16) for weight in weights):
        return f"quantization: {quantization} needs dtype float32, bfloat16 or float16"
    return None
