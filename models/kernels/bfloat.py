"""Products of bfloat16 weights by the processor's instruction for dot products of pairs; sixteen outputs at once.

Every row adds its pairs of inputs in the same order, whatever rows are computed with it: four running sums, by turns,
which are added at the end. Letters: R rows, K inputs, P panels of LANES outputs; a panel holds, pair after pair of
inputs, the two weights of each lane.
"""

import numpy as np
from numba import njit, prange

from models.kernels.simd import LANES, add_lanes, add_pair_dots, splat, store

AT_ONCE = 4
"""Rows that go through a panel together."""
PAIRS_AT_ONCE = 4
"""Inputs come in multiples of so many pairs."""
ZERO = np.float32(0.0)


@njit(nogil=True, cache=True, error_model="numpy")
def _one(panel, x, out, column):
    a = b = c = d = splat(ZERO)
    for pair in range(0, x.shape[0] // 2, PAIRS_AT_ONCE):
        w, k = pair * 2 * LANES, pair * 2
        a = add_pair_dots(a, panel, w, x, k)
        b = add_pair_dots(b, panel, w + 2 * LANES, x, k + 2)
        c = add_pair_dots(c, panel, w + 4 * LANES, x, k + 4)
        d = add_pair_dots(d, panel, w + 6 * LANES, x, k + 6)
    store(out, column, add_lanes(add_lanes(a, b), add_lanes(c, d)))


@njit(nogil=True, cache=True, error_model="numpy")
def _four(panel, x, out, column):
    x0, x1, x2, x3 = x[0], x[1], x[2], x[3]
    a0 = b0 = c0 = d0 = a1 = b1 = c1 = d1 = splat(ZERO)
    a2 = b2 = c2 = d2 = a3 = b3 = c3 = d3 = splat(ZERO)
    for pair in range(0, x0.shape[0] // 2, PAIRS_AT_ONCE):
        w, k = pair * 2 * LANES, pair * 2
        a0, a1 = add_pair_dots(a0, panel, w, x0, k), add_pair_dots(a1, panel, w, x1, k)
        a2, a3 = add_pair_dots(a2, panel, w, x2, k), add_pair_dots(a3, panel, w, x3, k)
        w, k = w + 2 * LANES, k + 2
        b0, b1 = add_pair_dots(b0, panel, w, x0, k), add_pair_dots(b1, panel, w, x1, k)
        b2, b3 = add_pair_dots(b2, panel, w, x2, k), add_pair_dots(b3, panel, w, x3, k)
        w, k = w + 2 * LANES, k + 2
        c0, c1 = add_pair_dots(c0, panel, w, x0, k), add_pair_dots(c1, panel, w, x1, k)
        c2, c3 = add_pair_dots(c2, panel, w, x2, k), add_pair_dots(c3, panel, w, x3, k)
        w, k = w + 2 * LANES, k + 2
        d0, d1 = add_pair_dots(d0, panel, w, x0, k), add_pair_dots(d1, panel, w, x1, k)
        d2, d3 = add_pair_dots(d2, panel, w, x2, k), add_pair_dots(d3, panel, w, x3, k)
    store(out[0], column, add_lanes(add_lanes(a0, b0), add_lanes(c0, d0)))
    store(out[1], column, add_lanes(add_lanes(a1, b1), add_lanes(c1, d1)))
    store(out[2], column, add_lanes(add_lanes(a2, b2), add_lanes(c2, d2)))
    store(out[3], column, add_lanes(add_lanes(a3, b3), add_lanes(c3, d3)))


@njit(nogil=True, parallel=True, cache=True, error_model="numpy")
def multiply_bfloats(x, panels, out):
    """x [R, K] · panels [P, K · LANES], both bfloat16's bits → out float32 [R, P · LANES]."""
    whole = x.shape[0] // AT_ONCE * AT_ONCE
    for panel in prange(panels.shape[0]):
        own, column = panels[panel], panel * LANES
        for row in range(0, whole, AT_ONCE):
            _four(own, x[row : row + AT_ONCE], out[row : row + AT_ONCE], column)
        for row in range(whole, x.shape[0]):
            _one(own, x[row], out[row], column)
