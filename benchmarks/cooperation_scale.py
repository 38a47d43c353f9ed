"""Part `scale`: on the simulator, how far one router and one coordinator reach, and where they bend.

Processor time is that of the router's own code, in the simulation's one thread; whatever else runs there is taken out.
"""

import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from benchmarks.experts import EXPERT, SUBJECTS, TARGET, WEAK, prompt_of
from benchmarks.joined import Output
from benchmarks.report import Report
from benchmarks.simulation.clock import run
from benchmarks.simulation.cluster import SimulatedCluster
from benchmarks.simulation.links import LinkSpec
from benchmarks.simulation.profile import ModelProfile, Profile, make_profile
from benchmarks.simulation.traffic import Request, streams
from models.emulated import EmulateSpec

DRAFTERS = (1, 2, 4, 8, 16, 32, 64)
STREAMS, PER_STREAM, TOKENS = 16, 8, 64
LINK = LinkSpec(0.35)
TARGET_SPEC = EmulateSpec(agreement=1.0, errors="own", base_ms=45.0, per_token_ms=0.2)


@dataclass(frozen=True, slots=True)
class Served:
    """`cpu_s`: of the router; `hops`: steps answered."""

    results: list[Output]
    cpu_s: float
    hops: int

    @property
    def tokens_per_s(self) -> float:
        seconds = max(r.arrived_s[-1] for r in self.results) - min(r.asked_s for r in self.results)
        return sum(len(r.tokens) for r in self.results) / seconds

    @property
    def cpu(self) -> str:
        per_request, per_hop = self.cpu_s * 1e3 / len(self.results), self.cpu_s * 1e6 / self.hops
        return f"{per_request:.0f} ms, {per_hop:.0f} µs of {self.hops / len(self.results):.0f} hops"


def profile_of(num_drafters: int, drafter_replicas: int = 1, target_replicas: int = 1) -> Profile:
    """The i-th drafter is an expert in the i-th subject, in turn."""
    drafters = [
        ModelProfile(f"drafter-{i}", _drafter(SUBJECTS[i % len(SUBJECTS)]), 1, drafter_replicas, LINK)
        for i in range(num_drafters)
    ]
    return make_profile((*drafters, ModelProfile(TARGET, TARGET_SPEC, 2, target_replicas, LINK)))


def _drafter(own: str) -> EmulateSpec:
    agreement = {f"{s}: ": EXPERT if s == own else WEAK for s in SUBJECTS} | {"default": WEAK}
    return EmulateSpec(agreement=agreement, errors="own", confidence_spread=0.2, base_ms=3.0, per_sequence_ms=0.1)


def scale(report: Report) -> None:
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for number, served in zip(DRAFTERS, pool.map(_with_drafters, DRAFTERS), strict=True):
            report.add(f"scale, drafters per verifier {number}", f"{served.tokens_per_s:.0f} tokens/s")
            report.add("  router's processor time a request", served.cpu)
    served = run(_served(profile_of(16, 48, 232), 2000, 1, 0))
    report.add("scale, 1,000 replicas, 2,000 requests", f"{served.tokens_per_s:.0f} tokens/s")
    report.add("  router's processor time a request", served.cpu)


def _with_drafters(number: int) -> Served:
    return run(_served(profile_of(number), STREAMS, PER_STREAM, PER_STREAM))


async def _served(profile: Profile, number: int, per_stream: int, warming: int) -> Served:
    cluster = SimulatedCluster(profile)

    def make(title: str, nth: int) -> Request:
        return Request(prompt_of(title, nth).encode(), TOKENS)

    if warming:
        await streams(cluster, number, warming, partial(make, "warm-up"))
    before_s, before_hops = _router_s(cluster), _hops(cluster)
    results = await streams(cluster, number, per_stream, partial(make, "measured"))
    after_s, after_hops = _router_s(cluster), _hops(cluster)
    await cluster.close()
    return Served(results, after_s - before_s, after_hops - before_hops)


def _router_s(cluster: SimulatedCluster) -> float:
    return time.thread_time() - cluster.others.total_s


def _hops(cluster: SimulatedCluster) -> int:
    return sum(sum(histogram.counts) for histogram in cluster.router.stats.step_s.values())
