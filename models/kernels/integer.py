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
from models.kernels.simd import (
    LANES,
    add_byte_dots,
    fma,
    fma_lanes,
    high_halves,
    load,
    load_bfloats,
    load_bytes,
    low_halves,
    scale,
    splat,
    splat_int,
    store,
    subtract_ints,
    to_floats,
)

GROUP = 32
AT_ONCE = 4
"""Rows that go through a panel together."""
ZERO = np.float32(0.0)
TO_NEAREST = np.float32(1.5 * 2**23)
"""Added to a small number it leaves the nearest integer in the low bits."""


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize_row(x, codes, scales, sums):
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
        scales[group], sums[group] = most / np.float32(127.0), total


@njit(nogil=True, parallel=True, cache=True, error_model="numpy")
def _quantize_parallel(x, codes, scales, sums):
    for row in prange(x.shape[0]):
        _quantize_row(x[row], codes[row], scales[row], sums[row])


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize(x):
    """x [R, K] → codes int8 [R, G · GROUP], scales [R, G], sums of codes [R, G]."""
    num_groups = (x.shape[1] + GROUP - 1) // GROUP
    codes = np.zeros((x.shape[0], num_groups * GROUP), np.int8)
    scales = np.empty((x.shape[0], num_groups), np.float32)
    sums = np.empty((x.shape[0], num_groups), np.int32)
    if x.shape[0] > SERIAL_ROWS:
        _quantize_parallel(x, codes, scales, sums)
    else:
        for row in range(x.shape[0]):
            _quantize_row(x[row], codes[row], scales[row], sums[row])
    return codes, scales, sums


@njit(nogil=True, cache=True, error_model="numpy")
def _int4_of_one(panel, steps, x, scales, sums, out, column):
    total = splat(ZERO)
    for group in range(scales.shape[0]):
        dots = splat_int(np.int32(0))
        for v in range(4):
            pairs, k = load_bytes(panel, group * 256 + 64 * v), group * GROUP + 8 * v
            dots = add_byte_dots(dots, low_halves(pairs), x, k)
            dots = add_byte_dots(dots, high_halves(pairs), x, k + 4)
        step, zero = load_bfloats(steps, group * 2 * LANES), load_bfloats(steps, (group * 2 + 1) * LANES)
        own = scales[group]
        total = fma(own * np.float32(sums[group]), zero, fma_lanes(scale(own, step), to_floats(dots), total))
    store(out, column, total)


@njit(nogil=True, cache=True, error_model="numpy")
def _int4_of_four(panel, steps, x, scales, sums, out, column):
    x0, x1, x2, x3 = x[0], x[1], x[2], x[3]
    t0 = t1 = t2 = t3 = splat(ZERO)
    for group in range(scales.shape[1]):
        d0 = d1 = d2 = d3 = splat_int(np.int32(0))
        for v in range(4):
            pairs, k = load_bytes(panel, group * 256 + 64 * v), group * GROUP + 8 * v
            codes = low_halves(pairs)
            d0, d1 = add_byte_dots(d0, codes, x0, k), add_byte_dots(d1, codes, x1, k)
            d2, d3 = add_byte_dots(d2, codes, x2, k), add_byte_dots(d3, codes, x3, k)
            codes = high_halves(pairs)
            d0, d1 = add_byte_dots(d0, codes, x0, k + 4), add_byte_dots(d1, codes, x1, k + 4)
            d2, d3 = add_byte_dots(d2, codes, x2, k + 4), add_byte_dots(d3, codes, x3, k + 4)
        step, zero = load_bfloats(steps, group * 2 * LANES), load_bfloats(steps, (group * 2 + 1) * LANES)
        s0, s1, s2, s3 = scales[0, group], scales[1, group], scales[2, group], scales[3, group]
        n0, n1 = s0 * np.float32(sums[0, group]), s1 * np.float32(sums[1, group])
        n2, n3 = s2 * np.float32(sums[2, group]), s3 * np.float32(sums[3, group])
        t0 = fma(n0, zero, fma_lanes(scale(s0, step), to_floats(d0), t0))
        t1 = fma(n1, zero, fma_lanes(scale(s1, step), to_floats(d1), t1))
        t2 = fma(n2, zero, fma_lanes(scale(s2, step), to_floats(d2), t2))
        t3 = fma(n3, zero, fma_lanes(scale(s3, step), to_floats(d3), t3))
    store(out[0], column, t0)
    store(out[1], column, t1)
    store(out[2], column, t2)
    store(out[3], column, t3)


@njit(nogil=True, cache=True, error_model="numpy")
def _int8_of_one(panel, steps, x, scales, sums, out, column):
    total = splat(ZERO)
    for group in range(scales.shape[0]):
        dots = splat_int(np.int32(0))
        for v in range(8):
            dots = add_byte_dots(dots, load_bytes(panel, group * 512 + 64 * v), x, group * GROUP + 4 * v)
        signed = subtract_ints(dots, splat_int(np.int32(128 * sums[group])))
        total = fma(scales[group], to_floats(signed), total)
    store(out, column, fma_lanes(total, load(steps, 0), splat(ZERO)))


@njit(nogil=True, cache=True, error_model="numpy")
def _int8_of_four(panel, steps, x, scales, sums, out, column):
    x0, x1, x2, x3 = x[0], x[1], x[2], x[3]
    t0 = t1 = t2 = t3 = splat(ZERO)
    for group in range(scales.shape[1]):
        d0 = d1 = d2 = d3 = splat_int(np.int32(0))
        for v in range(8):
            codes, k = load_bytes(panel, group * 512 + 64 * v), group * GROUP + 4 * v
            d0, d1 = add_byte_dots(d0, codes, x0, k), add_byte_dots(d1, codes, x1, k)
            d2, d3 = add_byte_dots(d2, codes, x2, k), add_byte_dots(d3, codes, x3, k)
        d0 = subtract_ints(d0, splat_int(np.int32(128 * sums[0, group])))
        d1 = subtract_ints(d1, splat_int(np.int32(128 * sums[1, group])))
        d2 = subtract_ints(d2, splat_int(np.int32(128 * sums[2, group])))
        d3 = subtract_ints(d3, splat_int(np.int32(128 * sums[3, group])))
        t0, t1 = fma(scales[0, group], to_floats(d0), t0), fma(scales[1, group], to_floats(d1), t1)
        t2, t3 = fma(scales[2, group], to_floats(d2), t2), fma(scales[3, group], to_floats(d3), t3)
    step, nothing = load(steps, 0), splat(ZERO)
    store(out[0], column, fma_lanes(t0, step, nothing))
    store(out[1], column, fma_lanes(t1, step, nothing))
    store(out[2], column, fma_lanes(t2, step, nothing))
    store(out[3], column, fma_lanes(t3, step, nothing))


def _of_one(panel, steps, x, scales, sums, out, column):
    """One row by the kernel that the steps belong to; inside kernels only."""
    raise NotImplementedError


def _of_four(panel, steps, x, scales, sums, out, column):
    """As `_of_one`, for AT_ONCE rows."""
    raise NotImplementedError


def _by_steps(int4, int8):
    def choose(panel, steps, x, scales, sums, out, column):
        kernel = int4 if steps.dtype == types.uint16 else int8

        def run(panel, steps, x, scales, sums, out, column):
            kernel(panel, steps, x, scales, sums, out, column)

        return run

    return choose


overload(_of_one)(_by_steps(_int4_of_one, _int8_of_one))
overload(_of_four)(_by_steps(_int4_of_four, _int8_of_four))


@njit(nogil=True, parallel=True, cache=True, error_model="numpy")
def multiply_integers(x, codes, steps, out):
    """x [R, K], float32 or bfloat16's bits → out float32 [R, P · LANES].

    int4  codes uint8 [P, G · 256], steps bfloat16's bits [P, G · 2 · LANES]: of each group the scales of a panel's
          outputs, then what their code 0 is
    int8  codes uint8 [P, G · 512], steps float32 [P, LANES]: the scale of each output
    """
    rows, scales, sums = _quantize(x)
    whole = x.shape[0] // AT_ONCE * AT_ONCE
    for panel in prange(codes.shape[0]):
        own, own_steps, column = codes[panel], steps[panel], panel * LANES
        for row in range(0, whole, AT_ONCE):
            end = row + AT_ONCE
            _of_four(own, own_steps, rows[row:end], scales[row:end], sums[row:end], out[row:end], column)
        for row in range(whole, x.shape[0]):
            _of_one(own, own_steps, rows[row], scales[row], sums[row], out[row], column)
