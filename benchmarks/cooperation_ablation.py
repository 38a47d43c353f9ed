"""Part `ablation`: on the simulator, how much throughput is lost without each of what cooperating drafters do."""

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

WARM_UP, PER_STREAM, TOKENS = 100, 12, 96
CONCURRENCIES = (1, 4, 16)
STAGES = {
    "all": Stage(FULL),
    "routing": Stage(FULL, "random"),
    "fusion": Stage({**FULL, "cooperate": 1}),
    "tree": Stage({**FULL, "tree_nodes": 0}),
    "pipeline": Stage({**FULL, "draft_ahead": False}),
    "speculation": Stage({**FULL, "policy": "fixed", "chain": (TARGET,)}),
}


def ablation(report: Report) -> None:
    for errors in ("own", "shared"):
        for concurrency in CONCURRENCIES:
            speeds = {name: run(_tokens_per_s(stage, errors, concurrency)) for name, stage in STAGES.items()}
            report.add(f"ablation, errors {errors}, {concurrency} at once: all", f"{speeds['all']:.1f} tokens/s")
            for name in list(STAGES)[1:]:
                lost = 1.0 - speeds[name] / speeds["all"]
                report.add(f"ablation, errors {errors}, {concurrency} at once: without {name}", f"{-lost:+.1%}")
            if errors == "shared":
                lost = 1.0 - speeds["all"] / speeds["fusion"]
                title = f"ablation, errors shared, {concurrency} at once: lost by fusion"
                report.add(title, f"{lost:+.1%}", "≤ 2 %", lost <= 0.02)


async def _tokens_per_s(stage: Stage, errors: str, concurrency: int) -> float:
    profile = profile_of(HOP_MS, errors, ROW_MS).with_settings(**stage.router)
    cluster = SimulatedCluster(profile)

    def make(title: str, number: int) -> Request:
        return Request(prompt_of(title, number).encode(), TOKENS, stage.speculation(number))

    await streams(cluster, concurrency, WARM_UP // concurrency, lambda n: make("warm-up", n))
    results = await streams(cluster, concurrency, PER_STREAM, lambda n: make("measured", n))
    await cluster.close()
    return concurrency * 1e3 / fmean(result.ms_per_token for result in results)
