"""Matrix products that give a row the same bits whatever other rows are computed with it.

Libraries choose kernels, and with them the order of additions, by the number of rows. oneDNN's with weights packed once
keep one order over a wide range of row counts; `row_range` finds the range for each shape when a model is loaded, and
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
PERIOD = 16
FORMATS = (torch.float32, torch.bfloat16)
"""What is packed."""

Run = Callable[[torch.Tensor], torch.Tensor]


class Product:
    """x [R, K] → x · weightᵀ (+ bias), [R, N]; x in the weight's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.dtype, self.num_inputs = weight.dtype, weight.shape[1]
        self._run = _packed(weight, bias)
        self._range = 1, 2**31
        if weight.device.type == "cpu" and weight.dtype != torch.float64:
            outputs, inputs = weight.shape
            self._range = row_range(outputs, inputs, weight.dtype, bias is not None, torch.get_num_threads())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _within(self._range, self._run, x)


def _within(counts: tuple[int, int], run: Run, x: torch.Tensor) -> torch.Tensor:
    """Fewer rows than the least count are padded, more than the most are split."""
    least, most = counts
    if least <= x.shape[0] <= most:
        return run(x)
    parts = [pad(rows, (0, 0, 0, max(0, least - rows.shape[0]))) for rows in x.split(most)]
    return torch.cat([run(part) for part in parts])[: x.shape[0]]


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
def row_range(outputs: int, inputs: int, dtype: torch.dtype, has_bias: bool, threads: int) -> tuple[int, int]:
    """(least, most) rows between which a row's bits stay, whatever their number and its place among them.

    Every output of the trial is a sum whose second half takes back the first, so that nothing but rounding is left: two
    orders of addition cannot give the same by chance, as they mostly do once a sum is rounded to bfloat16.
    """
    del threads  # only tells cached results apart
    generator = torch.Generator().manual_seed(0)
    half, order = inputs // 2, torch.randperm(inputs // 2, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator, dtype=dtype)
    weight[:, half : 2 * half] = -weight[:, order]
    few, repeats = torch.randn(PERIOD, inputs, generator=generator, dtype=dtype), MOST[0] // PERIOD
    few[:, half : 2 * half] = few[:, order]
    run = _packed(weight, torch.zeros(outputs, dtype=dtype) if has_bias else None)
    rows = few.repeat(repeats, 1)
    for least in LEAST:
        alone = torch.cat([run(block) for block in few.split(least)]).repeat(repeats, 1)
        same = {count: torch.equal(run(rows[:count]), alone[:count]) for count in COUNTS if count >= least}
        for most in MOST:
            if all(equal for count, equal in same.items() if count <= most):
                return least, most
    return MOST[-1], MOST[-1]
