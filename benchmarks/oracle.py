"""What a chain costs per token, by playing it: a Monte Carlo of the round rule, token by token.

It shares no code and no formula with `router/`: it keeps a real sequence, real contexts and each level's count of
computed rows, and adds up the time of every batch. Contexts form a tree; a context draws its errors once and all
levels see the same draw, so the correlations between levels are there too, which the planner's independent positions
leave out.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

RIGHT = 0


@dataclass(frozen=True, slots=True)
class Level:
    """A batch takes base + per_token × rows + per_sequence; each call of the level adds one hop."""

    base_ms: float
    agreement: float
    per_token_ms: float = 0.0
    per_sequence_ms: float = 0.0
    hop_ms: float = 0.0


class Context:
    """A prefix. `draws` are its u values: one for all levels, or one per level where errors are their own."""

    __slots__ = ("children", "draws")

    def __init__(self, rng: random.Random, num_draws: int) -> None:
        self.draws = [rng.random() for _ in range(num_draws)]
        self.children: dict[int, Context] = {}


@dataclass(slots=True)
class Game:
    """One sequence running through `levels` (cheapest first) with `windows`."""

    levels: Sequence[Level]
    windows: Sequence[int]
    errors: Literal["shared", "own"]
    rng: random.Random
    tokens: list[int] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    elapsed_ms: float = 0.0

    def __post_init__(self) -> None:
        if len(self.windows) != len(self.levels) - 1:
            raise ValueError("a chain of n levels has n − 1 windows")
        self.computed = [0] * len(self.levels)
        self.contexts = [self._fresh()]
        self._append(RIGHT)

    def _fresh(self) -> Context:
        return Context(self.rng, len(self.levels) if self.errors == "own" else 1)

    def _append(self, token: int) -> None:
        parent = self.contexts[-1]
        if token not in parent.children:
            parent.children[token] = self._fresh()
        self.contexts.append(parent.children[token])
        self.tokens.append(token)

    def _truncate(self, length: int) -> None:
        del self.tokens[length:], self.contexts[length + 1 :]
        self.computed = [min(computed, length) for computed in self.computed]

    def _sample(self, level: int, context: Context) -> int:
        own = self.errors == "own"
        u = context.draws[level if own else 0]
        if u < self.levels[level].agreement:
            return RIGHT
        return level + 1 if own else 1

    def _batch(self, level: int) -> None:
        """Compute all rows that the level lacks."""
        cost = self.levels[level]
        rows = len(self.tokens) - self.computed[level]
        self.computed[level] = len(self.tokens)
        self.elapsed_ms += cost.base_ms + cost.per_token_ms * rows + cost.per_sequence_ms

    def draft(self, count: int) -> None:
        for _ in range(count):
            self._batch(0)
            self._append(self._sample(0, self.contexts[-1]))
        self.elapsed_ms += self.levels[0].hop_ms

    def check(self, level: int, from_len: int) -> None:
        self._batch(level)
        self.elapsed_ms += self.levels[level].hop_ms
        position = from_len
        while position < len(self.tokens):
            if self._sample(level, self.contexts[position]) != self.tokens[position]:
                break
            position += 1
        own_token = self._sample(level, self.contexts[position])
        self._truncate(position)
        self._append(own_token)

    def produce(self, level: int) -> None:
        """Let `level` deliver once: level 0 drafts, the others collect until their window is full and check it all."""
        if level == 0:
            self.draft(self.windows[0])
            return
        from_len = len(self.tokens)
        while len(self.tokens) - from_len < self.windows[level - 1]:
            self.produce(level - 1)
        self.check(level, from_len)

    def round(self) -> int:
        """One round of the chain; returns how many tokens it committed."""
        before = len(self.tokens)
        if len(self.levels) == 1:
            self.check(0, before)
        else:
            self.produce(len(self.levels) - 1)
        committed = len(self.tokens) - before
        self._forget()
        return committed

    def _forget(self) -> None:
        """Keep the last token only: what is committed is never looked at again."""
        dropped = len(self.tokens) - 1
        del self.tokens[:dropped], self.contexts[:dropped]
        self.contexts[0].children.clear()
        self.computed = [computed - dropped for computed in self.computed]


def ms_per_token(
    levels: Sequence[Level],
    windows: Sequence[int],
    *,
    errors: Literal["shared", "own"] = "shared",
    num_tokens: int = 20_000,
    seed: int = 0,
) -> float:
    """Time per committed token over at least `num_tokens` tokens; the last level's agreement must be 1."""
    if levels[-1].agreement != 1.0:
        raise ValueError("the target's agreement is 1 by definition")
    game = Game(levels, windows, errors, random.Random(seed))
    committed = 0
    while committed < num_tokens:
        committed += game.round()
    return game.elapsed_ms / committed


@dataclass(frozen=True, slots=True)
class Best:
    """`chain` holds indices into the levels asked about, the target's last."""

    chain: tuple[int, ...]
    windows: tuple[int, ...]
    ms_per_token: float


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
) -> tuple[tuple[int, ...], float]:
    """Search the windows of one chain: coarse grid, then steps of one. Equal seeds keep the comparison fair."""
    known: dict[tuple[int, ...], float] = {}

    def cost(windows: tuple[int, ...]) -> float:
        if windows not in known:
            known[windows] = ms_per_token(levels, windows, errors=errors, num_tokens=num_tokens, seed=seed)
        return known[windows]

    coarse = [window for window in (1, 2, 4, 7, 11, 16) if window <= max_window]
    best = min(itertools.product(coarse, repeat=len(levels) - 1), key=cost)
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
    for chain in chains(len(levels)):
        members = [levels[i] for i in chain]
        windows, cost = best_windows(members, max_window=max_window, errors=errors, num_tokens=num_tokens, seed=seed)
        if len(chain) not in found or cost < found[len(chain)].ms_per_token:
            found[len(chain)] = Best(chain, windows, cost)
    return {length: _measured_again(best, levels, errors, num_tokens, seed + 1) for length, best in found.items()}


def _measured_again(
    best: Best, levels: Sequence[Level], errors: Literal["shared", "own"], num_tokens: int, seed: int
) -> Best:
    members = [levels[i] for i in best.chain]
    cost = ms_per_token(members, best.windows, errors=errors, num_tokens=4 * num_tokens, seed=seed)
    return Best(best.chain, best.windows, cost)
