"""A decoder layer: its steps between two products, each one call; and the whole of it where all products are kernels.

Letters: R rows, C hidden size, H query heads, G key/value heads, D head size.
"""

import numpy as np
from numba import njit, types
from numba.extending import overload

from models.kernels.attention import attend, store_rows
from models.kernels.bfloat import multiply_bfloats
from models.kernels.elementwise import add, put, rms_norm, rotate, silu_gate, wide
from models.kernels.integer import multiply_integers
from models.kernels.simd import LANES


@njit(nogil=True, cache=True, error_model="numpy")
def attention_step(
    qkv, query_norm, key_norm, epsilon, cos, sin, keys, values, units, tables, firsts, positions, also,
    scaling, window, out,
):  # fmt: skip
    """qkv [R, (H + 2 · G) · D], the layer's cache and `attend`'s places → out [R, H · D]; stores keys and values.

    query_norm, key_norm [D], empty where heads are not normed · cos, sin [R, D / 2]
    """
    rows, kv_heads, size = qkv.shape[0], values.shape[1], values.shape[3]
    heads = qkv.shape[1] // size - 2 * kv_heads
    parts = np.empty((rows, heads + 2 * kv_heads, size), np.float32)
    for row in range(rows):
        own, given = parts[row].reshape(qkv.shape[1]), qkv[row]
        for i in range(given.shape[0]):
            own[i] = wide(given[i])
        if query_norm.shape[0] > 0:
            query, key = parts[row, :heads], parts[row, heads : heads + kv_heads]
            rms_norm(query, query_norm, epsilon, query)
            rms_norm(key, key_norm, epsilon, key)
    rotate(parts, heads + kv_heads, cos, sin)
    query, key, value = parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]
    store_rows(key, value, keys, values, tables, firsts, positions, also)
    attended = np.empty((rows, heads, size), np.float32)
    attend(units, query, keys, values, tables, firsts, positions, scaling, window, attended)
    for row in range(rows):
        own, result = attended[row].reshape(heads * size), out[row]
        for i in range(result.shape[0]):
            put(result, i, own[i])


@njit(nogil=True, cache=True, error_model="numpy")
def add_and_norm(x, update, weight, epsilon, out):
    """x [R, C] += update [R, C]; x normed → out [R, C]."""
    add(x, update)
    rms_norm(x, weight, epsilon, out)


def _multiply(x, panels, steps, out):
    """The kernel that the operands belong to; inside kernels only."""
    raise NotImplementedError


@overload(_multiply)
def _multiply_of_kind(x, panels, steps, out):
    if panels.dtype == types.uint16:
        return lambda x, panels, steps, out: multiply_bfloats(x, panels, out)

    def run(x, panels, steps, out):
        multiply_integers(x, panels, steps, out)

    return run


@njit(nogil=True, cache=True, error_model="numpy")
def product(x, operands):
    """x [R, K] → float32 [R, P · LANES]; operands as in models/kernel_products.py."""
    panels, steps, bias = operands
    out = np.empty((x.shape[0], panels.shape[0] * LANES), np.float32)
    _multiply(x, panels, steps, out)
    if bias.shape[0] > 0:
        for row in range(out.shape[0]):
            out[row] += bias
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def whole_layer(x, normed, products, norms, epsilon, turns, cache, places, scaling, window):
    """x [R, C] through one layer, in place; normed [R, C], as products want it, before and after.

    products  operands of qkv, out, gate and up, down · norms  of query, key, before the MLP, before the next layer
    turns     cosines and sines · cache  the layer's keys and values · places  units, tables, firsts, positions, also
    """
    qkv, out, gate_up, down = products
    query_norm, key_norm, before_mlp, before_next = norms
    cos, sin = turns
    keys, values = cache
    units, tables, firsts, positions, also = places
    parts = product(normed, qkv)
    attended = np.empty((x.shape[0], parts.shape[1] - 2 * values.shape[1] * values.shape[3]), normed.dtype)
    attention_step(
        parts, query_norm, key_norm, epsilon, cos, sin, keys, values, units, tables, firsts, positions, also,
        scaling, window, attended,
    )  # fmt: skip
    add_and_norm(x, product(attended, out), before_mlp, epsilon, normed)
    gates = product(normed, gate_up)
    gated = np.empty((x.shape[0], gates.shape[1] // 2), normed.dtype)
    silu_gate(gates, gated)
    add_and_norm(x, product(gated, down), before_next, epsilon, normed)
