"""Part `ablation`: on the simulator, how much throughput is lost without each of what cooperating drafters do."""

import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from statistics import fmean

from benchmarks.cooperation_ladder import profile_of
from benchmarks.experts import FULL, TARGET, Stage, prompt_of
from benchmarks.report import Report
from benchmarks.simulation.clock import run
from benchmarks.simulation.cluster import SimulatedCluster
from benchmarks.simulation.traffic import Request, streams

HOP_MS = 0.7
ROW_MS = 0.2
"""Of the target, per token checked: verification that costs nothing would make every tree as wide as can be."""

WARM_UP, MEASURED, TOKENS = 96, 144, 64
"""Requests, and tokens of each: so many that what a stage is worth shows among lucky and unlucky texts."""

CONCURRENCIES = (1, 8)
STAGES = {
    "all": Stage(FULL),
    "routing": Stage(FULL, "random"),
    "fusion": Stage({**FULL, "cooperate": 1}),
    "tree": Stage({**FULL, "tree_nodes": 0}),
    "pipeline": Stage({**FULL, "draft_ahead": False}),
    "speculation": Stage({**FULL, "policy": "fixed", "chain": (TARGET,)}),
}


def ablation(report: Report) -> None:
    runs = list(product(("own", "shared"), CONCURRENCIES, STAGES))
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        speeds = dict(zip(runs, pool.map(tokens_per_s, *zip(*runs, strict=True)), strict=True))
    for errors, concurrency in product(("own", "shared"), CONCURRENCIES):
        title, full = f"ablation, errors {errors}, {concurrency} at once", speeds[errors, concurrency, "all"]
        report.add(f"{title}: all", f"{full:.1f} tokens/s")
        for stage in list(STAGES)[1:]:
            report.add(f"{title}: without {stage}", f"{speeds[errors, concurrency, stage] / full - 1.0:+.1%}")
        if errors == "shared":
            lost = 1.0 - full / speeds[errors, concurrency, "fusion"]
            report.add(f"{title}: lost by fusion", f"{lost:+.1%}", "≤ 2 %", lost <= 0.02)


def tokens_per_s(errors: str, concurrency: int, stage: str) -> float:
    """Of all requests together."""
    return run(_tokens_per_s(STAGES[stage], errors, concurrency))


async def _tokens_per_s(stage: Stage, errors: str, concurrency: int) -> float:
    profile = profile_of(HOP_MS, errors, ROW_MS).with_settings(**stage.router)
    cluster = SimulatedCluster(profile)

    def make(title: str, number: int) -> Request:
        return Request(prompt_of(title, number).encode(), TOKENS, stage.speculation(number))

    await streams(cluster, concurrency, WARM_UP // concurrency, partial(make, "warm-up"))
    results = await streams(cluster, concurrency, MEASURED // concurrency, partial(make, "measured"))
    await cluster.close()
    return concurrency * 1e3 / fmean(result.ms_per_token for result in results)
