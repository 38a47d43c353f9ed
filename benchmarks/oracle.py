"""What a chain costs per token, by playing it: a Monte Carlo of the round rule, token by token.

It shares no code and no formula with `router/`: it keeps a real sequence, the context of each of its positions and each
level's count of computed rows, and adds up the time of every batch. A context draws its errors once and all levels see
the same draw, so the correlations between levels are there too, which the planner's independent positions leave out.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
from numba import njit

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

RIGHT = 0
MOST_HELD = 4096
"""Tokens of one round; windows are far smaller."""


@dataclass(frozen=True, slots=True)
class Level:
    """A batch takes base + per_token × rows + per_sequence; each call of the level adds one hop."""

    base_ms: float
    agreement: float
    per_token_ms: float = 0.0
    per_sequence_ms: float = 0.0
    hop_ms: float = 0.0


@njit(cache=True)
def _play(
    costs: tuple[Floats, Floats, Floats],
    agreement: Floats,
    windows: Ids,
    tail_window: int,
    own: bool,
    count: int,
    rng: np.random.Generator,
) -> float:
    """Milliseconds per token over at least `count` tokens. `costs`: of a batch, a row and a call, per level.

    `tokens[:n]` is what stands since the last commit, its last token first; `draws[k]` belongs to the context of the
    first k of them, one number for all levels or one for each; `computed[i]`: rows that level i has. Where there is a
    tail, it stands as one level more behind the target.
    """
    batch_ms, row_ms, call_ms = costs
    num_levels = len(agreement)
    tail = num_levels - 1
    target = num_levels - 2 if tail_window > 0 else num_levels - 1
    tokens = np.zeros(MOST_HELD, np.int64)
    draws = rng.random((MOST_HELD, num_levels))
    computed = np.zeros(num_levels, np.int64)
    begun = np.zeros(num_levels, np.int64)  # where the block that a level collects begins
    elapsed_ms, committed, n = 0.0, 0, 1
    while committed < count:
        before = n
        begun[:] = n
        level = 0
        while True:
            if level == 0 and target > 0:
                begun[1] = n
                for i in range(windows[0] + tail_window):
                    drafter = 0 if i < windows[0] else tail
                    elapsed_ms += batch_ms[drafter] + row_ms[drafter] * (n - computed[drafter])
                    computed[drafter] = n
                    draw = draws[n, drafter if own else 0]
                    tokens[n] = RIGHT if draw < agreement[drafter] else (drafter + 1 if own else 1)
                    n += 1
                    draws[n] = rng.random(num_levels)
                elapsed_ms += call_ms[0] + (call_ms[tail] if tail_window > 0 else 0.0)
                level = 1
            elapsed_ms += batch_ms[level] + row_ms[level] * (n - computed[level]) + call_ms[level]
            computed[level] = n
            position, sample = begun[level], 0
            while True:
                draw = draws[position, level if own else 0]
                sample = RIGHT if draw < agreement[level] else (level + 1 if own else 1)
                if position == n or sample != tokens[position]:
                    break
                position += 1
            tokens[position] = sample
            n = position
            for other in range(num_levels):
                computed[other] = min(computed[other], n)
            n += 1
            draws[n] = rng.random(num_levels)
            if level == target:
                break
            if n - begun[level + 1] < windows[level]:
                begun[1 : level + 1] = n
                level = 0
            else:
                level += 1
        committed += n - before
        dropped = n - 1
        tokens[0] = tokens[dropped]
        draws[0], draws[1] = draws[dropped], draws[n]
        computed -= dropped
        n = 1
    return elapsed_ms / committed


def ms_per_token(
    levels: Sequence[Level],
    windows: Sequence[int],
    *,
    errors: Literal["shared", "own"] = "shared",
    num_tokens: int = 20_000,
    seed: int = 0,
    tail: tuple[Level, int] | None = None,
) -> float:
    """Time per committed token over at least `num_tokens` tokens; the last level's agreement must be 1.

    `tail`: who goes on after the first level's draft, and for how many tokens.
    """
    if levels[-1].agreement != 1.0:
        raise ValueError("the target's agreement is 1 by definition")
    if len(windows) != len(levels) - 1:
        raise ValueError("a chain of n levels has n − 1 windows")
    if tail is not None:
        levels = [*levels, tail[0]]
    costs = (
        np.array([level.base_ms + level.per_sequence_ms for level in levels]),
        np.array([level.per_token_ms for level in levels]),
        np.array([level.hop_ms for level in levels]),
    )
    agreement, rng = np.array([level.agreement for level in levels]), np.random.default_rng(seed)
    tail_window = 0 if tail is None else tail[1]
    made: float = _play(costs, agreement, np.array(windows, np.int64), tail_window, errors == "own", num_tokens, rng)
    return made


@dataclass(frozen=True, slots=True)
class Best:
    """`chain` holds indices into the levels asked about, the target's last; with a `tail_window`, the first of them
    goes on after the draft of the chain's first.
    """

    chain: tuple[int, ...]
    windows: tuple[int, ...]
    ms_per_token: float
    tail_window: int = 0

    def measured(self, levels: Sequence[Level], errors: Literal["shared", "own"], num_tokens: int, seed: int) -> float:
        """Time per token, played again."""
        tail = (levels[0], self.tail_window) if self.tail_window else None
        members = [levels[i] for i in self.chain]
        return ms_per_token(members, self.windows, errors=errors, num_tokens=num_tokens, seed=seed, tail=tail)


def chains(num_levels: int) -> Iterator[tuple[int, ...]]:
    """All chains that end in the target, shortest first."""
    lower = range(num_levels - 1)
    for length in range(num_levels):
        for subset in itertools.combinations(lower, length):
            yield (*subset, num_levels - 1)


def best_windows(
    levels: Sequence[Level],
    *,
    max_window: int = 16,
    errors: Literal["shared", "own"] = "shared",
    num_tokens: int = 6_000,
    seed: int = 0,
    tail: Level | None = None,
) -> tuple[tuple[int, ...], float]:
    """Search the windows of one chain, a tail's last: coarsely, all equal where there are many, then by steps of one
    and two.

    Equal seeds keep the comparison fair.
    """
    known: dict[tuple[int, ...], float] = {}
    num_windows = len(levels) - 1 + (tail is not None)

    def cost(windows: tuple[int, ...]) -> float:
        if windows not in known:
            goes_on = (tail, windows[-1]) if tail is not None else None
            inner = windows[: len(levels) - 1]
            known[windows] = ms_per_token(levels, inner, errors=errors, num_tokens=num_tokens, seed=seed, tail=goes_on)
        return known[windows]

    coarse = [window for window in (1, 2, 4, 7, 11, 16) if window <= max_window]
    grid = itertools.product(coarse, repeat=num_windows) if num_windows <= 2 else [(w,) * num_windows for w in coarse]
    best = min(grid, key=cost)
    while (step := min(_neighbours(best, max_window), key=cost, default=best)) != best and cost(step) < cost(best):
        best = step
    return best, cost(best)


def _neighbours(windows: tuple[int, ...], max_window: int) -> Iterator[tuple[int, ...]]:
    for i, change in itertools.product(range(len(windows)), (-2, -1, 1, 2)):
        if 1 <= windows[i] + change <= max_window:
            yield (*windows[:i], windows[i] + change, *windows[i + 1 :])


def best_by_length(
    levels: Sequence[Level],
    *,
    max_window: int = 16,
    errors: Literal["shared", "own"] = "shared",
    num_tokens: int = 6_000,
    seed: int = 0,
) -> dict[int, Best]:
    """The fastest chain of each length 1 … n, measured again with another seed so that luck does not choose."""
    found: dict[int, Best] = {}
    for best in best_of_chains(levels, max_window, errors, num_tokens, seed, with_tails=False):
        if len(best.chain) not in found or best.ms_per_token < found[len(best.chain)].ms_per_token:
            found[len(best.chain)] = best
    return {length: _measured_again(best, levels, errors, num_tokens, seed + 1) for length, best in found.items()}


def best_of_chains(
    levels: Sequence[Level],
    max_window: int,
    errors: Literal["shared", "own"],
    num_tokens: int,
    seed: int,
    *,
    with_tails: bool = True,
) -> Iterator[Best]:
    """Each chain with its best windows, and with the first level as a tail where the chain has drafts but not of it."""
    for chain in chains(len(levels)):
        members = [levels[i] for i in chain]
        search = partial(best_windows, members, max_window=max_window, errors=errors, num_tokens=num_tokens, seed=seed)
        yield Best(chain, *search())
        if with_tails and chain[0] > 0 and len(chain) > 1:
            windows, time_ms = search(tail=levels[0])
            yield Best(chain, windows[:-1], time_ms, windows[-1])


def _measured_again(
    best: Best, levels: Sequence[Level], errors: Literal["shared", "own"], num_tokens: int, seed: int
) -> Best:
    return replace(best, ms_per_token=best.measured(levels, errors, 4 * num_tokens, seed))
