"""A decoder layer's steps between two products, each one call.

Letters: R rows, C hidden size, H query heads, G key/value heads, D head size.
"""

import numpy as np
from numba import njit

from models.kernels.attention import attend, store_rows
from models.kernels.elementwise import add, rms_norm, rotate


@njit(nogil=True, cache=True, error_model="numpy")
def attention_step(
    qkv, query_norm, key_norm, epsilon, cos, sin, keys, values, units, tables, firsts, positions, scaling, window, out
):
    """qkv [R, (H + 2 · G) · D], the layer's cache and `attend`'s places → out [R, H · D]; stores keys and values.

    query_norm, key_norm [D], empty where heads are not normed · cos, sin [R, D / 2]
    """
    rows, kv_heads, size = qkv.shape[0], values.shape[1], values.shape[3]
    heads = qkv.shape[1] // size - 2 * kv_heads
    parts = qkv.reshape(rows, heads + 2 * kv_heads, size)
    query, key = np.empty((rows, heads, size), np.float32), np.empty((rows, kv_heads, size), np.float32)
    value = parts[:, heads + kv_heads :]
    for row in range(rows):
        query[row] = parts[row, :heads]
        key[row] = parts[row, heads : heads + kv_heads]
        if query_norm.shape[0] > 0:
            rms_norm(query[row], query_norm, epsilon, query[row])
            rms_norm(key[row], key_norm, epsilon, key[row])
    rotate(query, cos, sin)
    rotate(key, cos, sin)
    store_rows(key, value, keys, values, tables, firsts, positions)
    attended = out.reshape(rows, heads, size)
    attend(units, query, keys, values, tables, firsts, positions, scaling, window, attended)


@njit(nogil=True, cache=True, error_model="numpy")
def add_and_norm(x, update, weight, epsilon, out):
    """x [R, C] += update [R, C]; x normed → out [R, C]."""
    add(x, update)
    rms_norm(x, weight, epsilon, out)
