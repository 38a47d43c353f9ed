"""How close the router's choices are to the best there is: `python -m benchmarks.routing --parts computed load …`.

computed  random tables, no actors: the planner's predicted time per token beside the oracle's for the same plan, its
          plan beside the best one that the oracle finds, and the time that planning takes.
load      four emulated levels at several concurrencies, beside the best static plan that a search finds.
classes   requests of three kinds with opposite best chains, mixed.
drift     agreement and speed of a level change live in the middle of traffic; `--plot FILE` draws one such run.
none      speculation does not pay: useless drafters; a full batch of a compute-bound target.
pairs     the divergence of all pairs of levels, and a pair chosen that never ran.
laptop    real weights and prompts (`--prompts`), adaptive beside each static chain.
cpu       the router's processor time per hop, everybody else being played (benchmarks/router_cpu.py).

Exit code 1 where a figure falls short of its target. docs/benchmarks.md says how each figure is measured.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmarks.oracle import Level, best_of_chains, ms_per_token
from benchmarks.report import Report
from benchmarks.router_cpu import router_cpu
from benchmarks.routing_classes import classes
from benchmarks.routing_drift import drift
from benchmarks.routing_laptop import laptop
from benchmarks.routing_load import SETTINGS, load
from benchmarks.routing_none import none
from benchmarks.routing_pairs import pairs
from router.planner import Found, Planner
from router.snapshot import ModelCost, PairEstimate, TableSnapshot

MAX_WINDOW = 16
FEWEST_LEVELS, MOST_LEVELS = 2, 6
SEARCH_TOKENS, ORACLE_TOKENS = 20_000, 100_000
NAMES = tuple("abcdef")


@dataclass(frozen=True, slots=True)
class Computed:
    """Of one table: relative error of the prediction, and time of the planner's plan by the best one's, less 1."""

    error: float
    excess: float


def random_levels(rng: random.Random, num_levels: int) -> list[Level]:
    """Cheap to dear: a drafter may cost a hundredth of the target or two thirds of it, and be right .2 to .98."""
    agreements = [*sorted(rng.uniform(0.2, 0.98) for _ in range(num_levels - 1)), 1.0]
    target_ms = rng.uniform(10.0, 60.0)
    bases = [*sorted(target_ms * 10.0 ** rng.uniform(-2.0, -0.2) for _ in range(num_levels - 1)), target_ms]
    return [
        Level(base, agreement, rng.uniform(0.0, 0.05) * base, rng.uniform(0.0, 0.03) * base, rng.uniform(0.1, 1.5))
        for base, agreement in zip(bases, agreements, strict=True)
    ]


def levels_of(seed: int) -> list[Level]:
    rng = random.Random(seed)
    return random_levels(rng, rng.randint(FEWEST_LEVELS, MOST_LEVELS))


def planning_ms(seed: int) -> tuple[float, float]:
    """For the first time, and again after the table has changed a little."""
    found: Found = {}
    levels = levels_of(seed)
    changed = [replace(level, agreement=min(1.0, 0.98 * level.agreement)) for level in levels[:-1]]
    times = []
    for snapshot in (snapshot_of(levels), snapshot_of([*changed, levels[-1]])):
        started_s = time.perf_counter()
        Planner(snapshot, MAX_WINDOW, found).choose(NAMES[: len(levels)])
        times.append((time.perf_counter() - started_s) * 1e3)
    return times[0], times[1]


def snapshot_of(levels: Sequence[Level]) -> TableSnapshot:
    """What a router knows after long: each model's cost, how often each pair agrees where errors are shared, and that
    errors of cheaper levels include those of dearer ones.
    """
    models, pairs = {}, {}
    for i, (name, level) in enumerate(zip(NAMES, levels, strict=False)):
        models[name] = ModelCost(name, i + 1, level.base_ms, level.per_token_ms, level.per_sequence_ms, level.hop_ms)
        for other, lower in zip(NAMES[:i], levels, strict=False):
            acceptance = 1.0 - abs(lower.agreement - level.agreement)
            pairs[other, name] = PairEstimate(other, name, acceptance, 1.0 - acceptance, 1000)
    names = NAMES[: len(levels)]
    return TableSnapshot(models, pairs, dict.fromkeys(combinations(names, 3), -1.0))


def compare(seed: int) -> Computed:
    """One random table, known to planner and oracle alike."""
    levels = levels_of(seed)
    names = NAMES[: len(levels)]
    plan = Planner(snapshot_of(levels), MAX_WINDOW).choose(names)
    chosen = [levels[names.index(name)] for name in plan.chain]
    tail = None if plan.tail is None else (levels[names.index(plan.tail.model)], plan.tail.window)
    real_ms = ms_per_token(chosen, plan.windows, num_tokens=ORACLE_TOKENS, seed=seed, tail=tail)
    found = best_of_chains(levels, MAX_WINDOW, "shared", SEARCH_TOKENS, seed + 1)
    best = min(found, key=lambda best: best.ms_per_token)
    best_ms = best.measured(levels, "shared", ORACLE_TOKENS, seed)  # the plan's draws, not those that chose it
    return Computed(plan.predicted_ms_per_token / real_ms - 1.0, real_ms / best_ms - 1.0)


def computed(report: Report, num_tables: int) -> None:
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = list(pool.map(compare, range(num_tables)))
    errors = np.abs([result.error for result in results])
    excess = np.array([result.excess for result in results])
    median, p95 = np.quantile(errors, (0.5, 0.95))
    report.add(f"predicted against oracle, {num_tables} tables: median", f"{median:.1%}", "≤ 5 %", median <= 0.05)
    report.add("predicted against oracle: 95th percentile", f"{p95:.1%}", "≤ 10 %", p95 <= 0.10)
    most, mean = float(excess.max()), float(excess.mean())
    report.add("the planner's plan above the oracle's best: worst", f"{most:.1%}", "≤ 3 %", most <= 0.03)
    report.add("the planner's plan above the oracle's best: mean", f"{mean:.1%}")
    first, again = np.transpose([planning_ms(seed) for seed in range(num_tables)])
    for name, times in (("first", first), ("again after a change", again)):
        p50, p99 = np.quantile(times, (0.5, 0.99))
        report.add(f"planning time, {name}: p50, p99", f"{p50:.2f}, {p99:.2f} ms")


def _computed(report: Report, arguments: argparse.Namespace) -> None:
    computed(report, arguments.tables)


def _load(report: Report, arguments: argparse.Namespace) -> None:
    asyncio.run(load(report, arguments.concurrency))


def _classes(report: Report, _: argparse.Namespace) -> None:
    asyncio.run(classes(report))


def _drift(report: Report, arguments: argparse.Namespace) -> None:
    asyncio.run(drift(report, arguments.plot))


def _none(report: Report, _: argparse.Namespace) -> None:
    asyncio.run(none(report))


def _pairs(report: Report, _: argparse.Namespace) -> None:
    asyncio.run(pairs(report))


def _laptop(report: Report, arguments: argparse.Namespace) -> None:
    if arguments.prompts is None:
        report.add("laptop: left out, no --prompts", "")
        return
    laptop(report, arguments.prompts, arguments.repeats)


def _cpu(report: Report, _: argparse.Namespace) -> None:
    router_cpu(report)


PARTS = {
    "computed": _computed,
    "cpu": _cpu,
    "load": _load,
    "classes": _classes,
    "drift": _drift,
    "laptop": _laptop,
    "none": _none,
    "pairs": _pairs,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=sorted(PARTS))
    parser.add_argument("--tables", type=int, default=500)
    parser.add_argument("--concurrency", type=int, nargs="+", choices=sorted(SETTINGS), default=sorted(SETTINGS))
    parser.add_argument("--prompts", type=Path, help="JSONL with question_id, category and turns, for `laptop`")
    parser.add_argument("--repeats", type=int, default=3, help="of `laptop`")
    parser.add_argument("--plot", type=Path, help="PNG of the run with drift; needs matplotlib")
    arguments = parser.parse_args()
    report = Report()
    print(f"machine: {len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}")
    for part in arguments.parts:
        PARTS[part](report, arguments)
    sys.exit(int(report.short))


if __name__ == "__main__":
    main()
