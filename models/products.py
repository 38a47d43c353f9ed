"""Matrix products that give a row the same bits whatever other rows are computed with it.

Libraries choose kernels, and with them the order of additions, by the number of rows. Here every product on a CPU has
exactly `ROWS` rows: fewer are padded, more are split. Then a drafted token is judged by the same numbers as a token
generated alone, and speculation changes no bit of the text.
"""

import torch
from torch.nn.functional import linear, pad

ROWS = 8
"""Few enough to cost a single row little, enough to keep the multipliers busy while the weights are read once."""


class Product:
    """x [R, K] → x · weightᵀ (+ bias), [R, N]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight.contiguous()
        self._bias = bias
        self._fixed_rows = weight.device.type == "cpu" and weight.dtype != torch.float64

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._fixed_rows:
            return linear(x, self._weight, self._bias)
        num_rows = x.shape[0]
        missing = -num_rows % ROWS
        if missing:
            x = pad(x, (0, 0, 0, missing))
        if x.shape[0] == ROWS:
            return linear(x, self._weight, self._bias)[:num_rows]
        return torch.cat([linear(rows, self._weight, self._bias) for rows in x.split(ROWS)])[:num_rows]
