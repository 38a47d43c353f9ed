"""Matrix products that give a row the same bits whatever other rows are computed with it.

Libraries choose kernels, and with them the order of additions, by the number of rows. oneDNN's with weights packed once
keep one order over a wide range of row counts; `_limits` finds the range for each shape when a model is loaded, and
products of fewer rows are padded, those of more are split. So a drafted token is judged by the same numbers as a token
generated alone, and speculation changes no bit of the text.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch.nn.functional import linear, pad

COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 47, 48, 63, 64, 65, 96, 127, 128)
LEAST = (1, 2, 4, 8, 16)
MOST = (128, 64, 32, 16)
FIXED = (16, 16)
"""Where no range keeps one order."""
FORMATS = (torch.float32, torch.bfloat16)
"""What is packed."""

Run = Callable[[torch.Tensor], torch.Tensor]


class Product:
    """x [R, K] → x · weightᵀ (+ bias), [R, N]; x in the weight's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.dtype, self.num_inputs = weight.dtype, weight.shape[1]
        self._run = _packed(weight, bias)
        self._least, self._most = 1, 2**31
        if weight.device.type == "cpu" and weight.dtype != torch.float64:
            has_bias, threads = bias is not None, torch.get_num_threads()
            self._least, self._most = _limits(*weight.shape, weight.dtype, has_bias, threads)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._least <= x.shape[0] <= self._most:
            return self._run(x)
        return torch.cat([self._few(rows) for rows in x.split(self._most)])

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """As the call: many rows take the same kernel as few."""
        return self(x)

    def _few(self, x: torch.Tensor) -> torch.Tensor:
        missing = self._least - x.shape[0]
        return self._run(pad(x, (0, 0, 0, missing)))[: x.shape[0]] if missing > 0 else self._run(x)


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Run:
    if weight.device.type != "cpu" or weight.dtype not in FORMATS or not torch.backends.mkldnn.is_available():
        return lambda x: linear(x, weight, bias)
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001
        return lambda x: linear(x, weight, bias)
    # What torch.compile's frozen models call; there is no public name for it.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)  # noqa: SLF001
    multiply = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
    return lambda x: multiply(x, packed, bias, "none", [], "")


@lru_cache(maxsize=1024)
def _limits(outputs: int, inputs: int, dtype: torch.dtype, has_bias: bool, threads: int) -> tuple[int, int]:
    """(least, most) rows between which a row's bits stay, whatever their number and its place among them."""
    del threads  # only tells cached results apart
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    run = _packed(weight, torch.randn(outputs, generator=generator).to(dtype) if has_bias else None)
    few = torch.randn(16, inputs, generator=generator).to(dtype)
    rows = few.repeat(MOST[0] // len(few), 1)
    for least in LEAST:
        alone = torch.cat([run(few[i : i + least]) for i in range(0, len(few), least)]).repeat(MOST[0] // len(few), 1)
        same = {count: torch.equal(run(rows[:count]), alone[:count]) for count in COUNTS if count >= least}
        for most in MOST:
            if all(equal for count, equal in same.items() if count <= most):
                return least, most
    return FIXED
