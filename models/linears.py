"""Which matrix product a layer takes, and linear layers of any architecture that take it."""

import torch

from models.kernel_products import BfloatProduct, Int4Product, Int8Product, KernelProduct
from models.products import Product

AnyProduct = Product | KernelProduct


def make_product(quantization: str, weight: torch.Tensor, bias: torch.Tensor | None) -> AnyProduct:
    """The fastest here that keeps a row's bits. `quantization` as in the config."""
    if quantization == "none":
        return BfloatProduct(weight, bias) if BfloatProduct.fits(weight) else Product(weight, bias)
    return {"int8": Int8Product, "int4": Int4Product}[quantization](weight, bias)


class ProductLinear(torch.nn.Module):
    """Takes the place of a `torch.nn.Linear` in a model of any architecture."""

    def __init__(self, linear: torch.nn.Linear, quantization: str) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach()
        self._product = make_product(quantization, linear.weight.detach(), bias)

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
