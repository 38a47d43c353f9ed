"""What a decoder layer does between its products, row after row, in float32.

What products take and give may be bfloat16, as its bits in uint16: it is widened as it is read, and rounded to the
nearest even as it is written. Letters: R rows, C columns, D head size.
"""

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

SERIAL_ROWS = 6
"""Up to so many rows, one thread does the work: waking another takes time too."""


def wide(number):
    """float32 of a float32 or of the bits of a bfloat16; inside kernels only."""
    raise NotImplementedError


@overload(wide, inline="always")
def _wide(number):
    if number == types.uint16:
        return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)
    return lambda number: number


def put(array, at, number):
    """array[at] = number, rounded where the array holds bfloat16; inside kernels only."""
    raise NotImplementedError


@overload(put, inline="always")
def _put(array, at, number):
    if array.dtype == types.uint16:

        def put_bits(array, at, number):
            bits = np.float32(number).view(np.uint32)
            even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            array[at] = np.uint16(np.uint32(bits + even) >> np.uint32(16))

        return put_bits

    def put_float(array, at, number):
        array[at] = number

    return put_float


@njit(nogil=True, inline="always")
def exp_of_negative(x):
    """e^x for x ≤ 0 in float32, by Cephes' polynomial; below −87 it stays at e^−87, which is as good as 0."""
    x = max(x, np.float32(-87.0))
    whole = np.int32(x * np.float32(1.4426950408889634) - np.float32(0.5))
    n = np.float32(whole)
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * np.int32((whole + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(nogil=True, fastmath={"contract", "reassoc"}, cache=True, error_model="numpy")
def _inverse_root_mean_square(x, epsilon):
    squares = np.float32(0.0)
    for i in range(x.shape[0]):
        squares += x[i] * x[i]
    return np.float32(1.0) / np.sqrt(squares / np.float32(x.shape[0]) + epsilon)


@njit(nogil=True, cache=True, error_model="numpy")
def rms_norm(x, weight, epsilon, out):
    """x [R, C] float32 · 1 / (its row's root mean square) · weight [C] → out [R, C]; may be the same array."""
    for row in range(x.shape[0]):
        scale = _inverse_root_mean_square(x[row], epsilon)
        own, normed = x[row], out[row]
        for i in range(own.shape[0]):
            put(normed, i, own[i] * scale * weight[i])


@njit(nogil=True, cache=True, error_model="numpy")
def add(x, update):
    """x [R, C] float32 += update [R, C]."""
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[row, i] += wide(update[row, i])


@njit(nogil=True, cache=True, error_model="numpy")
def rotate(heads, count, cos, sin):
    """Rotary positions of the first `count` of heads [R, any, D], in place; cos, sin [R, D / 2]."""
    half = heads.shape[2] // 2
    for row in range(heads.shape[0]):
        for h in range(count):
            for d in range(half):
                a, b = heads[row, h, d], heads[row, h, d + half]
                heads[row, h, d] = a * cos[row, d] - b * sin[row, d]
                heads[row, h, d + half] = b * cos[row, d] + a * sin[row, d]


@njit(nogil=True, cache=True, error_model="numpy")
def _gate_row(gate_up, out):
    gate, up = gate_up[: out.shape[0]], gate_up[out.shape[0] :]
    for i in range(out.shape[0]):
        x = wide(gate[i])
        e = exp_of_negative(-abs(x))
        sigmoid = (np.float32(1.0) if x >= 0 else e) / (np.float32(1.0) + e)
        put(out, i, x * sigmoid * wide(up[i]))


@njit(nogil=True, parallel=True, cache=True, error_model="numpy")
def _gate_parallel(gate_up, out):
    for row in prange(out.shape[0]):
        _gate_row(gate_up[row], out[row])


@njit(nogil=True, cache=True, error_model="numpy")
def silu_gate(gate_up, out):
    """gate_up [R, 2 · C] → out [R, C]: silu(gate) · up."""
    if out.shape[0] > SERIAL_ROWS:
        _gate_parallel(gate_up, out)
    else:
        for row in range(out.shape[0]):
            _gate_row(gate_up[row], out[row])
