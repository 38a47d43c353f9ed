"""Part `testbed`: CoSine's cluster simulated, beside policies of other systems on the same machines.

Low and high load are streams that ask one request after the other, fluctuating load arrives at a rate that changes.
"""

import os
import random
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.experts import ALONE, FULL
from benchmarks.joined import Output, tokens_per_s
from benchmarks.report import Report, standard_error
from benchmarks.simulation.clock import run
from benchmarks.simulation.cluster import SimulatedCluster
from benchmarks.simulation.merged import MergedRounds
from benchmarks.simulation.profile import read_profile
from benchmarks.simulation.traffic import Request, arrivals, streams
from kvstate.protocol import Speculation
from router.driver import RoundDriver

PROFILE = Path("benchmarks/simulation/profiles/cosine.yaml")
DOMAINS = ("piqa", "medqa", "fiqa", "oasst")
TOKENS, PROMPT_WORDS = 64, 24
STREAMS = {"low": 2, "high": 32}
RATES = ((2.0, 6.0), (12.0, 4.0), (2.0, 6.0), (12.0, 4.0))
WARM_UP, PER_STREAM = 64, {"low": 40, "high": 4}
LESS_LATENCY, MORE_THROUGHPUT, MOST_WORSE = 0.232, 0.325, 0.02


@dataclass(frozen=True, slots=True)
class Policy:
    """`drafters`: that its requests ask for, one of them at random; none: no speculation; None: the router chooses.
    `window`: of their drafts; 0: planned.
    """

    router: Mapping[str, Any]
    drafters: tuple[str, ...] | None = None
    window: int = 0
    driver: type[RoundDriver] = RoundDriver

    def speculation(self, rng: random.Random) -> Speculation:
        if self.drafters is None:
            return Speculation()
        if not self.drafters:
            return Speculation("off")
        windows = (self.window,) if self.window else ()
        return Speculation("fixed", (rng.choice(self.drafters), "verifier"), windows)


FAST = tuple(f"fast-{domain}-1" for domain in DOMAINS)
EVERY = tuple(f"{kind}-{domain}-{i}" for kind in ("slow", "fast") for domain in DOMAINS for i in (1, 2))
ALL = "|".join(EVERY)
OTHERS = {
    "no speculation": Policy(ALONE, ()),
    "one static drafter": Policy(ALONE, FAST[:1]),
    **{f"tree of all drafts, {window} deep": Policy(ALONE, (ALL,), window, MergedRounds) for window in (3, 5, 8)},
    "pipeline, no routing": Policy({**ALONE, "draft_ahead": True}, FAST),
}
OURS = {
    "cooperating": Policy({**FULL, "cooperate": len(EVERY)}),
    "cooperating, without routing": Policy(FULL, (ALL,)),
}
POLICIES = {**OTHERS, **OURS}


@dataclass(frozen=True, slots=True)
class Figures:
    """Mean seconds of a request; tokens per second over all."""

    latency_s: float
    throughput: float


def testbed(report: Report, num_seeds: int) -> None:
    loads, seeds = (*STREAMS, "fluctuating"), range(1, num_seeds + 1)
    runs = list(product(POLICIES, loads, seeds))
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        figures = dict(zip(runs, pool.map(figures_of, *zip(*runs, strict=True)), strict=True))
    latency_gains, throughput_gains = [], []
    for load in loads:
        latency = {name: [figures[name, load, seed].latency_s for seed in seeds] for name in POLICIES}
        throughput = {name: [figures[name, load, seed].throughput for seed in seeds] for name in POLICIES}
        for name in POLICIES:
            figure = f"{_spread(latency[name], 2)} s, {_spread(throughput[name], 0)} tokens/s"
            report.add(f"testbed {load}: {name}", figure)
        least = min(statistics.fmean(latency[name]) for name in OTHERS)
        most = max(statistics.fmean(throughput[name]) for name in OTHERS)
        latency_gains.append(1.0 - statistics.fmean(latency["cooperating"]) / least)
        throughput_gains.append(statistics.fmean(throughput["cooperating"]) / most - 1.0)
        worst = min(latency_gains[-1], throughput_gains[-1])
        figure = f"latency {-latency_gains[-1]:+.1%}, throughput {throughput_gains[-1]:+.1%}"
        report.add(f"testbed {load}: against the best of them", figure, "≥ −2 %", worst >= -MOST_WORSE)
    best = max(latency_gains), max(throughput_gains)
    met = best[0] >= LESS_LATENCY and best[1] >= MORE_THROUGHPUT
    figure = f"latency {-best[0]:+.1%}, throughput {best[1]:+.1%}"
    report.add("testbed: at the best load", figure, "≤ −23.2 %, ≥ +32.5 %", met)


def figures_of(policy: str, load: str, seed: int) -> Figures:
    return run(_figures(POLICIES[policy], load, seed))


async def _figures(policy: Policy, load: str, seed: int) -> Figures:
    cluster = SimulatedCluster(read_profile(PROFILE).with_settings(**policy.router), policy.driver)
    warming, measured = (partial(_request, policy, f"{title} {seed}") for title in ("warm-up", "measured"))
    await streams(cluster, 4, WARM_UP // 4, warming)
    if load in STREAMS:
        results = await streams(cluster, STREAMS[load], PER_STREAM[load], measured)
    else:
        results = await arrivals(cluster, RATES, measured, seed)
    await cluster.close()
    return _summed(results)


def _request(policy: Policy, title: str, number: int) -> Request:
    rng = random.Random(f"{title} {number}")
    domain = rng.choice(DOMAINS)
    words = " ".join(f"{domain[:2]}{rng.randrange(40)}" for _ in range(PROMPT_WORDS))
    return Request(f"{domain}: {words}".encode(), TOKENS, policy.speculation(rng))


def _summed(results: Sequence[Output]) -> Figures:
    return Figures(statistics.fmean(result.latency_s for result in results), tokens_per_s(results))


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f} ± {standard_error(values):.{digits}f}"
