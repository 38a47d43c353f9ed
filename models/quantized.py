"""Weight-only quantized products by torch's CPU kernels, made from full weights at load. Activations keep their dtype.

int8: one scale per output, symmetric. int4: a scale and a zero point per output and 32 inputs, asymmetric. Both kernels
give a row the same bits whatever rows are computed with it, so no padding is needed (models/products.py). They are made
for few rows; `wide` serves the many rows of a prefill with the weights dequantized for the moment.
"""

import torch

from models.kernels.dequantize import dequantize_int4
from models.products import Product, multiply_many

GROUP = 32
INT4_OUTPUTS = 16
"""Outputs come in multiples of this."""


class Int8Product:
    """x [R, K] → x · weightᵀ (+ bias), [R, N]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        wide = weight.float()
        scales = (wide.abs().amax(dim=1) / 127.0).clamp_(min=1e-12)
        self._weight = (wide / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        self._scales = scales.to(weight.dtype)
        self._bias = bias
        self.dtype, self.num_inputs = weight.dtype, weight.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch._weight_int8pack_mm(x.contiguous(), self._weight, self._scales)  # noqa: SLF001 - no public name
        return out if self._bias is None else out + self._bias

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """The same for many rows; in other bits."""
        return multiply_many(x, self._weight.to(self.dtype) * self._scales[:, None], self._bias)


class Int4Product:
    """x [R, K] → x · weightᵀ (+ bias), [R, N]. K must be a multiple of GROUP, N one of INT4_OUTPUTS.

    The codes are kept twice, as torch's kernel wants them and as rows of bytes for `wide`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        groups = weight.float().unflatten(1, (-1, GROUP))  # [N, K / GROUP, GROUP]
        low, high = groups.amin(dim=-1), groups.amax(dim=-1)
        scales = ((high - low) / 15.0).clamp_(min=1e-12)
        codes = ((groups - low[..., None]) / scales[..., None]).round_().clamp_(0, 15).flatten(1)
        # The kernel computes (code − 8) · scale + zero.
        scales_and_zeros = torch.stack((scales, low + 8.0 * scales), dim=-1).to(weight.dtype)  # [N, K / GROUP, 2]
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu  # noqa: SLF001 - no public name
        self._weight = packed(codes.to(torch.int32), 1)
        self._scales_and_zeros = scales_and_zeros.transpose(0, 1).contiguous()
        self._bias = bias
        halves = codes.to(torch.uint8).unflatten(1, (-1, 2))
        self._codes = (halves[..., 0] | (halves[..., 1] << 4)).numpy()
        self._wide_scales = scales_and_zeros.float().numpy()
        self.dtype, self.num_inputs = weight.dtype, weight.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu  # noqa: SLF001 - no public name
        out: torch.Tensor = multiply(x.contiguous(), self._weight, GROUP, self._scales_and_zeros)
        return out if self._bias is None else out + self._bias

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """The same for many rows; in other bits."""
        full = torch.empty(len(self._codes), self.num_inputs, dtype=self.dtype)
        bits = full.view(torch.uint16) if self.dtype == torch.bfloat16 else full
        dequantize_int4(self._codes, self._wide_scales, bits.numpy())
        return multiply_many(x, full, self._bias)


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
        out: torch.Tensor = self._product(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        return out


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
    if quantization == "int4":
        for weight in weights:
            if weight.shape[1] % GROUP or weight.shape[0] % INT4_OUTPUTS:
                shape = "×".join(map(str, weight.shape))
                return f"quantization: int4 needs weights in multiples of {INT4_OUTPUTS}×{GROUP}, one is {shape}"
    return None
