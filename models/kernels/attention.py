"""Attention over paged blocks: each row's head is computed by itself, so nothing else in the batch changes its bits.

Keys lie with TILE positions side by side, [blocks, G, T / TILE, D, TILE], values with their dimensions side by side,
[blocks, G, T, D]: both passes are plain sums in a fixed order, sixteen at a time. Up to eight rows or heads that read
the same keys go through them together. Letters: R rows, H query heads, G key/value heads, D head size, T positions of a
block, S sequences; a *query* is one row's head, those of one sequence and key/value head are numbered row by row.
"""

import numpy as np
from numba import njit, prange

from models.kernels.elementwise import exp_of_negative
from models.kernels.rows import AT_ONCE, eight, fma, four, pick, put, zeros
from models.kernels.simd import LANES, load, maximum, store

TILE = LANES
"""Positions of a block, and head sizes, are multiples of it."""
ZERO = np.float32(0.0)


@njit(nogil=True, cache=True, error_model="numpy")
def _scores(queries, rows, keys, at, scores):
    """queries [·, D] · keys [D · TILE] → scores[:, at : at + TILE]."""
    totals = zeros(rows)
    for d in range(queries.shape[1]):
        totals = fma(pick(queries, rows, d), load(keys, d * TILE), totals)
    put(scores, rows, at, totals)


@njit(nogil=True, cache=True, error_model="numpy")
def _weighted_values(weights, rows, blocks, values, d, out):
    """weights [·, all positions] · `blocks` of values [T, D] → out[:, d : d + LANES]."""
    totals, size = zeros(rows), values.shape[1]
    for block in range(blocks.shape[0]):
        own = values[blocks[block]]
        for t in range(size):
            totals = fma(pick(weights, rows, block * size + t), load(own[t], d), totals)
    put(out, rows, d, totals)


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
def _attend_some(rows, query, keys, values, table, positions, scaling, window, out):
    """Queries of one sequence and key/value head: query, out [N, D], positions [N]; keys, values of that head."""
    size, num_queries = values.shape[1], positions.shape[0]
    first = max(0, positions[0] + 1 - window) // size if window > 0 else 0
    blocks = table[first : positions[num_queries - 1] // size + 1]
    scores = np.empty((num_queries, blocks.shape[0] * size), np.float32)
    for block in range(blocks.shape[0]):
        for tile in range(keys.shape[1]):
            _scores(query, rows, keys[blocks[block], tile], block * size + tile * TILE, scores)
    totals = np.empty(num_queries, np.float32)
    for i in range(num_queries):
        position = positions[i] - first * size
        totals[i] = _weigh(scores[i], max(0, position + 1 - window) if window > 0 else 0, position, scaling)
    for d in range(0, out.shape[1], LANES):
        _weighted_values(scores, rows, blocks, values, d, out)
    for i in range(num_queries):
        for d in range(out.shape[1]):
            out[i, d] /= totals[i]


@njit(nogil=True, cache=True, error_model="numpy")
def _attend_unit(unit, query, keys, values, tables, firsts, positions, scaling, window, out):
    """unit: of `make_units`."""
    sequence, head, first_query, count = unit[0], unit[1], unit[2], unit[3]
    first_row, group = firsts[sequence], query.shape[1] // keys.shape[1]
    some, result = np.empty((count, query.shape[2]), np.float32), np.empty((count, query.shape[2]), np.float32)
    places = np.empty(count, np.int64)
    for i in range(count):
        row = first_row + (first_query + i) // group
        some[i] = query[row, head * group + (first_query + i) % group]
        places[i] = positions[row]
    own = (keys[:, head], values[:, head], tables[sequence], places, scaling, window, result)
    if count > 4:
        _attend_some(eight(0, count - 1), some, *own)
    elif count > 1:
        _attend_some(four(0, count - 1), some, *own)
    else:
        _attend_some((0,), some, *own)
    for i in range(count):
        number = first_query + i
        out[first_row + number // group, head * group + number % group] = result[i]


@njit(nogil=True, cache=True, error_model="numpy")
def make_units(firsts, kv_heads, group):
    """What `attend` computes at once, [units, 4]: (sequence, key/value head, first query, queries).

    One head after another; a sequence's few queries are halved, so that each thread has some.
    """
    num_sequences = firsts.shape[0] - 1
    most = kv_heads * firsts[num_sequences] * group
    units, count = np.empty((most, 4), np.int64), 0
    for head in range(kv_heads):
        for s in range(num_sequences):
            num_queries = (firsts[s + 1] - firsts[s]) * group
            size = AT_ONCE if num_queries > AT_ONCE else AT_ONCE // 2
            for first in range(0, num_queries, size):
                unit = units[count]
                unit[0], unit[1], unit[2], unit[3] = s, head, first, min(size, num_queries - first)
                count += 1
    return units[:count]


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
