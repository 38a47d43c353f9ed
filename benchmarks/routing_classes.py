"""Part `classes`: requests of three kinds with opposite best chains, mixed; adaptive beside static plans.

The kinds begin with prefixes of their own, by which the models' agreement differs, and look unlike one another. Each
stream asks all kinds in turn.
"""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from benchmarks.client import Answer
from benchmarks.emulated_app import emulated_app, emulated_config
from benchmarks.emulated_client import AUTO, EmulatedClient, Wish, emulated_client
from benchmarks.oracle import Level, ms_per_token
from benchmarks.report import Report
from benchmarks.static_search import StaticPlan, grid, halving
from benchmarks.traffic import MakePrompt, MakeWish, Request, always, in_turn, steady, times_of

CODE, DIGITS, PROSE = "def f", "0.", "The "
KINDS = (CODE, DIGITS, PROSE)
WORDS = ("river", "letter", "garden", "winter", "harbour", "teacher", "window", "journey")
BASE_MS = {"left": 2.0, "right": 3.0, "middle": 9.0, "target": 40.0}
AGREEMENT: dict[str, dict[str, float]] = {
    "left": {CODE: 0.9, DIGITS: 0.3, PROSE: 0.3},
    "right": {CODE: 0.3, DIGITS: 0.9, PROSE: 0.3},
    "middle": {CODE: 0.6, DIGITS: 0.6, PROSE: 0.9},
}
CONCURRENCY = 3
TOKENS = 96
SPANS = ((1, 32), (32, TOKENS))
SEARCH = (1, 1)
WARM_UP_PER_STREAM = 12
TURNS, PER_TURN = 5, 3
SINGLE_CANDIDATES, KIND_CANDIDATES = 4, 3


def kind_of(number: int) -> str:
    """Each stream, asking every third number, meets all kinds."""
    return KINDS[(number + number // len(KINDS)) % len(KINDS)]


def prompt_of(title: str, number: int) -> str:
    kind, n = kind_of(number), zlib.crc32(f"{title} {number}".encode())
    if kind == CODE:
        return f"{CODE}_{n}(a, b):\n    return a[{n % 97}] + b.x{n % 13}\n"
    if kind == DIGITS:
        return f"{DIGITS}{n} + {n % 977} * 3.{n % 31} = "
    return PROSE + " ".join(WORDS[(n >> shift) % len(WORDS)] for shift in range(0, 30, 3)) + " and"


def _emulate() -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {name: {"base_ms": ms} for name, ms in BASE_MS.items()}
    for name, of_kind in AGREEMENT.items():
        values[name]["agreement"] = {**of_kind, "default": 0.5}
    values["target"]["agreement"] = 1.0
    return values


def _oracle_ms(plan: StaticPlan, kind: str, hop_ms: float) -> float:
    levels = [
        Level(BASE_MS[name], AGREEMENT[name][kind] if name in AGREEMENT else 1.0, hop_ms=hop_ms) for name in plan.chain
    ]
    return ms_per_token(levels, plan.windows, num_tokens=3_000)


async def classes(report: Report) -> None:
    with emulated_app(emulated_config("routing-classes", _emulate())) as app:
        async with emulated_client(app) as client:
            await _Classes(client, report).run(await client.hop_ms(TOKENS, 3))


@dataclass(slots=True)
class _Classes:
    client: EmulatedClient
    report: Report

    async def run(self, hop_ms: float) -> None:
        single, of_kind = await self._search(hop_ms)
        await self._mixed("warm-up", WARM_UP_PER_STREAM, always(AUTO))
        self.report.add("classes: warm-up of adaptive", f"{CONCURRENCY * WARM_UP_PER_STREAM} requests")
        wishes = {
            "adaptive": always(AUTO),
            "oracle": lambda number: of_kind[kind_of(number)].wish,
            "single": always(single.wish),
        }
        prompts: list[MakePrompt] = [partial(prompt_of, str(turn)) for turn in range(TURNS)]
        answers, busy = await in_turn(self.client, CONCURRENCY, wishes, prompts, TOKENS, PER_TURN)
        for kind in KINDS:
            figures = {name: times_of(_of_kind(of_name, kind)) for name, of_name in answers.items()}
            figure = ", ".join(f"{name} {times.mean:.2f}" for name, times in figures.items())
            ratio = figures["adaptive"].mean / figures["oracle"].mean
            self.report.add(f"classes {kind!r}: {of_kind[kind]}", f"{figure}: {ratio:.3f}")
            chosen = Counter("→".join(a.metrics["chain"]) for a in _of_kind(answers["adaptive"], kind))
            self.report.add(f"classes {kind!r}: last chain of adaptive", f"{dict(chosen)}")
        for first, last in SPANS:
            spans = {
                name: fmean(a.ms_per_token_from(first, last) for a in answers[name]) for name in ("adaptive", "oracle")
            }
            ratio = spans["adaptive"] / spans["oracle"]
            self.report.add(f"classes: tokens {first} to {last}, adaptive by best of each class", f"{ratio:.3f}")
        mean = {name: times_of(of_name).mean for name, of_name in answers.items()}
        faster, above = 1.0 - mean["adaptive"] / mean["single"], mean["adaptive"] / mean["oracle"]
        figure = f"{mean['adaptive']:.2f}, {mean['single']:.2f} ms"
        self.report.add(
            f"classes: adaptive, best single {single}", figure, f"≥ 15 % less: {faster:.1%}", faster >= 0.15
        )
        figure = f"{mean['adaptive']:.2f}, {mean['oracle']:.2f} ms"
        self.report.add("classes: adaptive, best chain of each class", figure, f"≤ 1.07×: {above:.3f}", above <= 1.07)
        self.report.add("classes: processors busy", f"{busy:.0%}")

    async def _mixed(self, title: str, per_stream: int, wish: MakeWish) -> list[Answer]:
        def make(number: int) -> Request:
            return Request(prompt_of(title, number), TOKENS, wish(number))

        return await steady(self.client, CONCURRENCY, per_stream, make)

    async def _search(self, hop_ms: float) -> tuple[StaticPlan, dict[str, StaticPlan]]:
        """The oracle names the few that are tried, in the mixed traffic: the other kinds go by its best chains."""
        costs = {plan: {kind: _oracle_ms(plan, kind, hop_ms) for kind in KINDS} for plan in grid(self.client.names)}
        ranked = {kind: sorted(costs, key=lambda plan, kind=kind: costs[plan][kind]) for kind in KINDS}  # type: ignore[misc]

        async def trial_of(kind: str, plan: StaticPlan, turn: int) -> float:
            def wish(number: int) -> Wish:
                return plan.wish if kind_of(number) == kind else ranked[kind_of(number)][0].wish

            answers = await self._mixed(f"search {turn}", len(KINDS) * SEARCH[turn], wish)
            return times_of(_of_kind(answers, kind)).mean

        async def trial(plan: StaticPlan, turn: int) -> float:
            return times_of(await self._mixed(f"search {turn}", len(KINDS) * SEARCH[turn], always(plan.wish))).mean

        of_kind = {
            kind: (await halving(ranked[kind][:KIND_CANDIDATES], partial(trial_of, kind), len(SEARCH), 1))[0]
            for kind in KINDS
        }
        of_all = sorted(costs, key=lambda plan: sum(costs[plan].values()))[:SINGLE_CANDIDATES]
        return (await halving(of_all, trial, len(SEARCH), 1))[0], of_kind


def _of_kind(answers: Sequence[Answer], kind: str) -> list[Answer]:
    """`answers` in the order of their numbers; every nine of them, which is what a turn has, are of the same kinds."""
    return [answer for number, answer in enumerate(answers) if kind_of(number) == kind]
