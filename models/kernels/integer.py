"""Products of quantized weights: rows are quantized to bytes, sixteen outputs are summed at once in integers.

Both operands go in groups of GROUP inputs. Within a group all is exact, whatever the order; the groups of a row are
added one after another in float32. So a row has the same bits in every batch and on every processor.
Letters: R rows, K inputs, G groups, P panels of LANES outputs. A panel's group of int4 codes is 4 vectors of 64 bytes:
lane by lane, four inputs in the low halves and the next four in the high ones. Of int8 codes it is 8 vectors, each code
raised by 128, because one operand has no sign.
"""

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from models.kernels.elementwise import SERIAL_ROWS, wide
from models.kernels.rows import (
    AT_ONCE,
    add_byte_dots,
    eight,
    fma,
    fma_lanes,
    four,
    int_zeros,
    pick,
    put,
    scale,
    shares,
    splat_ints,
    to_floats,
    zeros,
)
from models.kernels.simd import LANES, high_halves, load, load_bfloats, load_bytes, low_halves, prefetch

GROUP = 32
ZERO = np.float32(0.0)
TO_NEAREST = np.float32(1.5 * 2**23)
"""Added to a small number it leaves the nearest integer in the low bits."""


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize_row(x, codes, scales, lows, raised):
    for group in range(scales.shape[0]):
        own = x[group * GROUP : (group + 1) * GROUP]
        most = ZERO
        for i in range(own.shape[0]):
            most = max(most, abs(wide(own[i])))
        inverse = np.float32(127.0) / most if most > ZERO else ZERO
        total = np.int32(0)
        for i in range(own.shape[0]):
            code = np.int8(np.float32(wide(own[i]) * inverse + TO_NEAREST).view(np.int32))
            codes[group * GROUP + i] = code
            total += np.int32(code)
        scales[group] = most / np.float32(127.0)
        lows[group], raised[group] = scales[group] * np.float32(total), -128 * total


@njit(nogil=True, parallel=True, cache=True, error_model="numpy")
def _quantize_parallel(x, codes, scales, lows, raised):
    for row in prange(x.shape[0]):
        _quantize_row(x[row], codes[row], scales[row], lows[row], raised[row])


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize(x):
    """x [R, K] → codes, four in each int32 [R, 8 · G], and of each group [R, G] the scale, what a weight's zero is
    multiplied by, and what takes back that int8 weights are raised.
    """
    num_groups = (x.shape[1] + GROUP - 1) // GROUP
    codes = np.zeros((x.shape[0], num_groups * GROUP), np.int8)
    scales = np.empty((x.shape[0], num_groups), np.float32)
    lows, raised = np.empty_like(scales), np.empty(scales.shape, np.int32)
    if x.shape[0] > SERIAL_ROWS:
        _quantize_parallel(x, codes, scales, lows, raised)
    else:
        for row in range(x.shape[0]):
            _quantize_row(x[row], codes[row], scales[row], lows[row], raised[row])
    return codes.view(np.int32), scales, lows, raised


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply_int4(panel, steps, inputs, rows, out, column, fetched, step):
    """`fetched`: of the next panel's codes, the first that this pass brings to the cache, `step` each turn."""
    codes, scales, lows, _ = inputs
    totals = zeros(rows)
    for group in range(scales.shape[1]):
        dots = int_zeros(rows)
        for v in range(4):
            both, k = load_bytes(panel, group * 256 + 64 * v), group * GROUP // 4 + 2 * v
            dots = add_byte_dots(dots, low_halves(both), splat_ints(pick(codes, rows, k)))
            dots = add_byte_dots(dots, high_halves(both), splat_ints(pick(codes, rows, k + 1)))
            if step > 0:
                prefetch(panel, fetched)
                fetched += step
        size, zero = load_bfloats(steps, group * 2 * LANES), load_bfloats(steps, (group * 2 + 1) * LANES)
        totals = fma_lanes(scale(pick(scales, rows, group), size), to_floats(dots), totals)
        totals = fma(pick(lows, rows, group), zero, totals)
    put(out, rows, column, totals)


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply_int8(panel, steps, inputs, rows, out, column, fetched, step):
    """As `_multiply_int4`."""
    codes, scales, _, raised = inputs
    totals = zeros(rows)
    for group in range(scales.shape[1]):
        dots = splat_ints(pick(raised, rows, group))
        for v in range(8):
            inputs_of_four = splat_ints(pick(codes, rows, group * GROUP // 4 + v))
            dots = add_byte_dots(dots, load_bytes(panel, group * 512 + 64 * v), inputs_of_four)
            if step > 0:
                prefetch(panel, fetched)
                fetched += step
        totals = fma(pick(scales, rows, group), to_floats(dots), totals)
    put(out, rows, column, fma_lanes(totals, load(steps, 0), zeros(rows)))


def _multiply_rows(panel, steps, inputs, rows, out, column, fetched, step):
    """The kernel that the steps belong to; inside kernels only."""
    raise NotImplementedError


@overload(_multiply_rows)
def _by_steps(panel, steps, inputs, rows, out, column, fetched, step):
    kernel = _multiply_int4 if steps.dtype == types.uint16 else _multiply_int8

    def run(panel, steps, inputs, rows, out, column, fetched, step):
        kernel(panel, steps, inputs, rows, out, column, fetched, step)

    return run


@njit(nogil=True, parallel=True, cache=True, error_model="numpy")
def multiply_integers(x, codes, steps, out):
    """x [R, K], float32 or bfloat16's bits → out float32 [R, P · LANES].

    int4  codes uint8 [P, G · 256], steps bfloat16's bits [P, G · 2 · LANES]: of each group the scales of a panel's
          outputs, then what their code 0 is
    int8  codes uint8 [P, G · 512], steps float32 [P, LANES]: the scale of each output
    """
    inputs, last = _quantize(x), x.shape[0] - 1
    share, step = shares(codes.shape[1], 64, x.shape[0])
    for panel in prange(codes.shape[0]):
        own, own_steps, column, fetched = codes[panel], steps[panel], panel * LANES, codes.shape[1]
        for row in range(0, x.shape[0], AT_ONCE):
            if last - row >= 4:
                _multiply_rows(own, own_steps, inputs, eight(row, last), out, column, fetched, step)
            elif last - row >= 1:
                _multiply_rows(own, own_steps, inputs, four(row, last), out, column, fetched, step)
            else:
                _multiply_rows(own, own_steps, inputs, (row,), out, column, fetched, step)
            fetched += share
