"""Matrix products by kernels of our own, packed from full weights at load.

bfloat16: models/kernels/bfloat.py, where the processor has the instruction for it. int8: one scale per output,
symmetric. int4: a scale and an offset per output and 32 inputs, asymmetric. For these rows are quantized to bytes in
groups of 32 as they come (models/kernels/integer.py). A row has the same bits whatever rows are computed with it, so
no padding is needed, and many rows take the same kernel as few.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models.kernels.bfloat import PAIRS_AT_ONCE
from models.kernels.integer import GROUP
from models.kernels.layer import product
from models.kernels.simd import LANES, has_feature

Floats = npt.NDArray[np.float32]
Operands = tuple[npt.NDArray[Any], npt.NDArray[Any], Floats]
Array = npt.NDArray[np.float32] | npt.NDArray[np.uint16]
NOTHING: Floats = np.empty(0, np.float32)


def as_array(tensor: torch.Tensor) -> Array:
    """The same memory for kernels; bfloat16 as its bits."""
    array: Array = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


class KernelProduct:
    """x [R, K] → x · weightᵀ (+ bias), float32 [R, N]; `dtype` is what x must be.

    operands  for models/kernels/layer.py: codes or weights in panels, their steps, the bias; what is not there is empty
    """

    dtype = torch.float32

    def __init__(
        self, panels: npt.NDArray[Any], steps: npt.NDArray[Any], weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        full_bias = NOTHING if bias is None else np.zeros(len(panels) * LANES, np.float32)
        if bias is not None:
            full_bias[: self.num_outputs] = bias.detach().float().numpy()
        self.operands: Operands = (panels, steps, full_bias)

    @property
    def fills_panels(self) -> bool:
        return self.num_outputs % LANES == 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.from_numpy(product(as_array(x.contiguous()), self.operands))
        return out if self.fills_panels else out[:, : self.num_outputs].contiguous()


class BfloatProduct(KernelProduct):
    dtype = torch.bfloat16

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        full = torch.nn.functional.pad(weight.detach(), (0, 0, 0, -weight.shape[0] % LANES)).view(torch.uint16).numpy()
        panels = full.reshape(-1, LANES, weight.shape[1] // 2, 2).transpose(0, 2, 1, 3)  # [P, pair, lane, which]
        super().__init__(np.ascontiguousarray(panels).reshape(len(panels), -1), NOTHING, weight, bias)

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Whether it can be used, and is the fastest: processors with tiles of bfloat16 have better in oneDNN."""
        there = has_feature("avx512bf16") and not has_feature("amx-bf16")
        is_bfloat = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        return there and is_bfloat and weight.shape[1] % (2 * PAIRS_AT_ONCE) == 0


class Int8Product(KernelProduct):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        groups = _grouped(weight)
        steps = np.maximum(np.abs(groups).max(axis=(1, 2)) / np.float32(127.0), np.float32(1e-12))
        codes = (np.rint(groups / steps[:, None, None]) + 128.0).astype(np.uint8)
        panels = codes.reshape(-1, LANES, groups.shape[1], 8, 4).transpose(0, 2, 3, 1, 4)  # [P, G, vector, lane, byte]
        packed = np.ascontiguousarray(panels).reshape(len(panels), -1)
        super().__init__(packed, steps.reshape(-1, LANES), weight, bias)


class Int4Product(KernelProduct):
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
        super().__init__(packed, np.ascontiguousarray(both).reshape(len(panels), -1), weight, bias)


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
