"""Weights back from their codes. Letters: N outputs, K inputs."""

import numpy as np
from numba import njit, prange

from models.kernels.elementwise import put


@njit(nogil=True, cache=True, error_model="numpy")
def _row(codes, scales, out):
    size = out.shape[0] // scales.shape[0]
    for group in range(scales.shape[0]):
        scale, zero = scales[group, 0], scales[group, 1]
        own, packed = out[group * size : (group + 1) * size], codes[group * size // 2 : (group + 1) * size // 2]
        for k in range(packed.shape[0]):
            byte = packed[k]
            put(own, 2 * k, (np.float32(byte & 15) - np.float32(8.0)) * scale + zero)
            put(own, 2 * k + 1, (np.float32(byte >> 4) - np.float32(8.0)) * scale + zero)


@njit(nogil=True, parallel=True, cache=True)
def dequantize_int4(codes, scales, out):
    """codes [N, K / 2], the first of two inputs in the low half · scales [N, groups, 2], scale and zero → out [N, K].

    A weight is (code − 8) · scale + zero; float32 or the bits of bfloat16.
    """
    for row in prange(out.shape[0]):
        _row(codes[row], scales[row], out[row])
