"""Matrix products that give a row the same bits whatever other rows are computed with it.

Libraries choose kernels, and with them the order of additions, by the number of rows. Here every product on a CPU has
the same number of rows: fewer are padded, more are split. Then a drafted token is judged by the same numbers as a token
generated alone, and speculation changes no bit of the text.
"""

import torch
from torch.nn.functional import linear

NUM_ROWS = {torch.float32: 16, torch.bfloat16: 64, torch.float16: 64}
"""A few rows cost the reading of the weights; how many are as cheap depends on the processor's units for the format.
`python -m benchmarks.engine` measures it.
"""


class Product:
    """x [R, K] → x · weightᵀ (+ bias), [R, N]. Not for two threads at once: it keeps the rows of padding."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight.contiguous()
        self._bias = bias
        self._padded: torch.Tensor | None = None
        if weight.device.type == "cpu" and weight.dtype in NUM_ROWS:
            self._padded = torch.zeros(NUM_ROWS[weight.dtype], weight.shape[1], dtype=weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._padded is None:
            return linear(x, self._weight, self._bias)
        most = self._padded.shape[0]
        if x.shape[0] <= most:
            return self._few(x, self._padded)
        return torch.cat([self._few(rows, self._padded) for rows in x.split(most)])

    def _few(self, x: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        """What other rows hold changes no bit of these, so they keep what they held."""
        if x.shape[0] == padded.shape[0]:
            return linear(x, self._weight, self._bias)
        padded[: x.shape[0]] = x
        return linear(padded, self._weight, self._bias)[: x.shape[0]]
