"""Attention over paged blocks: each row's head is computed by itself, so nothing else in the batch changes its bits.

Keys lie with TILE positions side by side, [blocks, G, T / TILE, D, TILE], values with their dimensions side by side,
[blocks, G, T, D]: both passes are plain sums in a fixed order, sixteen at a time. Four rows or heads that read the same
keys go through them together. Letters: R rows, H query heads, G key/value heads, D head size, T positions of a block,
S sequences; a *query* is one row's head, those of one sequence and key/value head are numbered row by row.
"""

import numpy as np
from numba import njit, prange

from models.kernels.elementwise import exp_of_negative
from models.kernels.simd import LANES, fma, load, maximum, splat, store

TILE = LANES
"""Positions of a block, and head sizes, are multiples of it."""
AT_ONCE = 4
ZERO = np.float32(0.0)


@njit(nogil=True, cache=True, error_model="numpy")
def _scores(queries, keys, at, scores):
    """queries [4, D] · keys [D · TILE] → scores[:, at : at + TILE]."""
    q0, q1, q2, q3 = queries[0], queries[1], queries[2], queries[3]
    s0 = s1 = s2 = s3 = splat(ZERO)
    for d in range(q0.shape[0]):
        key = load(keys, d * TILE)
        s0, s1, s2, s3 = fma(q0[d], key, s0), fma(q1[d], key, s1), fma(q2[d], key, s2), fma(q3[d], key, s3)
    store(scores[0], at, s0)
    store(scores[1], at, s1)
    store(scores[2], at, s2)
    store(scores[3], at, s3)


@njit(nogil=True, cache=True, error_model="numpy")
def _scores_of_one(query, keys, at, scores):
    """As `_scores`, for one query."""
    total = splat(ZERO)
    for d in range(query.shape[0]):
        total = fma(query[d], load(keys, d * TILE), total)
    store(scores, at, total)


@njit(nogil=True, cache=True, error_model="numpy")
def _add_values(weights, at, values, sums):
    """sums [4, D] += weights[:, at : at + T] · values [T, D]."""
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    for d in range(0, values.shape[1], LANES):
        s0, s1, s2, s3 = load(sums[0], d), load(sums[1], d), load(sums[2], d), load(sums[3], d)
        for t in range(values.shape[0]):
            value, p = load(values[t], d), at + t
            s0, s1, s2, s3 = fma(w0[p], value, s0), fma(w1[p], value, s1), fma(w2[p], value, s2), fma(w3[p], value, s3)
        store(sums[0], d, s0)
        store(sums[1], d, s1)
        store(sums[2], d, s2)
        store(sums[3], d, s3)


@njit(nogil=True, cache=True, error_model="numpy")
def _add_values_of_one(weights, at, values, sums):
    """As `_add_values`, for one query."""
    for d in range(0, values.shape[1], LANES):
        total = load(sums, d)
        for t in range(values.shape[0]):
            total = fma(weights[at + t], load(values[t], d), total)
        store(sums, d, total)


@njit(nogil=True, cache=True, error_model="numpy")
def _highest(scores):
    """Of any number of scores."""
    whole = scores.shape[0] // LANES * LANES
    lanes = np.full(LANES, scores[0], np.float32)
    best = load(lanes, 0)
    for at in range(0, whole, LANES):
        best = maximum(best, load(scores, at))
    store(lanes, 0, best)
    highest = scores[0]
    for i in range(LANES):
        highest = max(highest, lanes[i])
    for i in range(whole, scores.shape[0]):
        highest = max(highest, scores[i])
    return highest


@njit(nogil=True, fastmath={"contract"}, cache=True, error_model="numpy")
def _exponentiate(scores, best, scaling):
    for i in range(scores.shape[0]):
        scores[i] = exp_of_negative((scores[i] - best) * scaling)


@njit(nogil=True, fastmath={"nsz", "reassoc"}, cache=True, error_model="numpy")
def _total(weights):
    total = ZERO
    for i in range(weights.shape[0]):
        total += weights[i]
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def _weigh(scores, first, position, scaling):
    """Scores of all positions to numerators of the softmax over `first` … `position`, 0 elsewhere; their sum."""
    seen = scores[first : position + 1]
    _exponentiate(seen, _highest(seen), scaling)
    scores[:first] = ZERO
    scores[position + 1 :] = ZERO
    return _total(seen)


@njit(nogil=True, cache=True, error_model="numpy")
def _attend_some(query, count, keys, values, table, head, positions, scaling, window, out):
    """`count` queries of one sequence and key/value head; query, out [4, D], positions [4]."""
    tiles, size = keys.shape[2], values.shape[2]
    last_block = positions[count - 1] // size
    first_block = max(0, positions[0] + 1 - window) // size if window > 0 else 0
    scores = np.empty((AT_ONCE, (last_block + 1) * size), np.float32)
    for block in range(first_block, last_block + 1):
        for tile in range(tiles):
            at = block * size + tile * TILE
            if count == 1:
                _scores_of_one(query[0], keys[table[block], head, tile], at, scores[0])
            else:
                _scores(query, keys[table[block], head, tile], at, scores)
    totals = np.empty(AT_ONCE, np.float32)
    for i in range(count):
        first = max(0, positions[i] + 1 - window) if window > 0 else 0
        totals[i] = _weigh(scores[i], first, positions[i], scaling)
    for i in range(count, AT_ONCE):
        scores[i] = ZERO
    out[:] = ZERO
    for block in range(first_block, last_block + 1):
        if count == 1:
            _add_values_of_one(scores[0], block * size, values[table[block], head], out[0])
        else:
            _add_values(scores, block * size, values[table[block], head], out)
    for i in range(count):
        for d in range(out.shape[1]):
            out[i, d] /= totals[i]


@njit(nogil=True, cache=True, error_model="numpy")
def _attend_unit(unit, query, keys, values, tables, firsts, positions, scaling, window, out):
    """unit: (sequence, key/value head, first query)."""
    sequence, head, first_query = unit[0], unit[1], unit[2]
    first_row, group = firsts[sequence], query.shape[1] // keys.shape[1]
    count = min(AT_ONCE, (firsts[sequence + 1] - first_row) * group - first_query)
    some, result = np.empty((AT_ONCE, query.shape[2]), np.float32), np.empty((AT_ONCE, query.shape[2]), np.float32)
    places = np.empty(AT_ONCE, np.int64)
    for i in range(AT_ONCE):
        number = first_query + min(i, count - 1)
        row = first_row + number // group
        some[i] = query[row, head * group + number % group]
        places[i] = positions[row]
    _attend_some(some, count, keys, values, tables[sequence], head, places, scaling, window, result)
    for i in range(count):
        number = first_query + i
        out[first_row + number // group, head * group + number % group] = result[i]


@njit(nogil=True, cache=True, error_model="numpy")
def make_units(firsts, kv_heads, group):
    """What `attend` computes at once, [units, 3]: (sequence, key/value head, first query). One head after another."""
    count = 0
    for s in range(firsts.shape[0] - 1):
        count += ((firsts[s + 1] - firsts[s]) * group + AT_ONCE - 1) // AT_ONCE
    units = np.empty((count * kv_heads, 3), np.int64)
    at = 0
    for head in range(kv_heads):
        for s in range(firsts.shape[0] - 1):
            for first in range(0, (firsts[s + 1] - firsts[s]) * group, AT_ONCE):
                units[at, 0], units[at, 1], units[at, 2] = s, head, first
                at += 1
    return units


@njit(nogil=True, parallel=True, cache=True, error_model="numpy")
def _attend_parallel(units, query, keys, values, tables, firsts, positions, scaling, window, out):
    for u in prange(units.shape[0]):
        _attend_unit(units[u], query, keys, values, tables, firsts, positions, scaling, window, out)


SERIAL_POSITIONS = 1024
"""Up to so many key positions read in all, one thread does the work: waking another takes time too."""


@njit(nogil=True, cache=True, error_model="numpy")
def attend(units, query, keys, values, tables, firsts, positions, scaling, window, out):
    """query [R, H, D] → out [R, H, D]: each row sees itself and what is before it in its sequence.

    units: of `make_units` · tables [S, most blocks] · firsts [S + 1], each sequence's first row · positions [R]
    window: how many positions a row sees, 0 for all
    """
    if units.shape[0] * positions.max() > SERIAL_POSITIONS:
        _attend_parallel(units, query, keys, values, tables, firsts, positions, scaling, window, out)
    else:
        for u in range(units.shape[0]):
            _attend_unit(units[u], query, keys, values, tables, firsts, positions, scaling, window, out)


@njit(nogil=True, cache=True, error_model="numpy")
def _store_row(key, value, keys, values, offset):
    """key, value [G, D] → one offset of a block's keys and values."""
    tile, lane = offset // TILE, offset % TILE
    for head in range(values.shape[0]):
        values[head, offset] = value[head]
        for d in range(values.shape[2]):
            keys[head, tile, d * TILE + lane] = key[head, d]


@njit(nogil=True, cache=True, error_model="numpy")
def move_rows(keys, values, moves):
    """Copy single positions within the cache; moves [M, 4]: (from block, from offset, to block, to offset)."""
    for m in range(moves.shape[0]):
        old, old_offset, new, new_offset = moves[m, 0], moves[m, 1], moves[m, 2], moves[m, 3]
        for head in range(values.shape[1]):
            values[new, head, new_offset] = values[old, head, old_offset]
            for d in range(values.shape[3]):
                key = keys[old, head, old_offset // TILE, d * TILE + old_offset % TILE]
                keys[new, head, new_offset // TILE, d * TILE + new_offset % TILE] = key


@njit(nogil=True, cache=True, error_model="numpy")
def store_rows(key, value, keys, values, tables, firsts, positions, also):
    """Put key, value [R, G, D] where their positions are kept; also [C, 3]: (row, block, offset), where else."""
    size = values.shape[2]
    for s in range(firsts.shape[0] - 1):
        for row in range(firsts[s], firsts[s + 1]):
            block, offset = tables[s, positions[row] // size], positions[row] % size
            _store_row(key[row], value[row], keys[block], values[block], offset)
    for c in range(also.shape[0]):
        row, block, offset = also[c, 0], also[c, 1], also[c, 2]
        _store_row(key[row], value[row], keys[block], values[block], offset)
