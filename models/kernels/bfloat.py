"""Products of bfloat16 weights by the processor's instruction for dot products of pairs; sixteen outputs at once.

Every row adds its pairs of inputs in the same order, whatever rows are computed with it: two running sums, by turns,
which are added at the end. Letters: R rows, K inputs, P panels of LANES outputs; a panel holds, pair after pair of
inputs, the two weights of each lane.
"""

import numpy as np
from numba import njit, prange

from models.kernels.rows import AT_ONCE, add, add_pair_dots, eight, four, pick, put, shares, splat_ints, zeros
from models.kernels.simd import LANES, load_bytes, prefetch

PAIRS_AT_ONCE = 2
"""Inputs come in multiples of so many pairs."""


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply_rows(panel, pairs, rows, out, column, fetched, step):
    """`fetched`: of the next panel's weights, the first that this pass brings to the cache, `step` each turn."""
    a = b = zeros(rows)
    for pair in range(0, pairs.shape[1], PAIRS_AT_ONCE):
        w = pair * 2 * LANES
        a = add_pair_dots(a, load_bytes(panel, w), splat_ints(pick(pairs, rows, pair)))
        b = add_pair_dots(b, load_bytes(panel, w + 2 * LANES), splat_ints(pick(pairs, rows, pair + 1)))
        if step > 0:
            prefetch(panel, fetched)
            fetched += step
    put(out, rows, column, add(a, b))


@njit(nogil=True, parallel=True, cache=True, error_model="numpy")
def multiply_bfloats(x, panels, out):
    """x [R, K] · panels [P, K · LANES], both bfloat16's bits → out float32 [R, P · LANES]."""
    pairs, last = x.view(np.int32), x.shape[0] - 1
    share, step = shares(panels.shape[1], 2 * PAIRS_AT_ONCE * LANES, x.shape[0])
    for panel in prange(panels.shape[0]):
        own, column, fetched = panels[panel], panel * LANES, panels.shape[1]
        for row in range(0, x.shape[0], AT_ONCE):
            if last - row >= 4:
                _multiply_rows(own, pairs, eight(row, last), out, column, fetched, step)
            elif last - row >= 1:
                _multiply_rows(own, pairs, four(row, last), out, column, fetched, step)
            else:
                _multiply_rows(own, pairs, (row,), out, column, fetched, step)
            fetched += share
