"""Part `scale`: on the simulator, how far one router and one coordinator reach, and where they bend.

Processor time is that of the router's own code, in the simulation's one thread; whatever else runs there is taken out.
"""

import asyncio
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.cooperation_ablation import HOP_MS, ROW_MS
from benchmarks.experts import TARGET, agreement_of, prompt_of
from benchmarks.joined import Output, tokens_per_s
from benchmarks.report import Report
from benchmarks.simulation.clock import run
from benchmarks.simulation.cluster import PLAN_S, SimulatedCluster
from benchmarks.simulation.links import LinkSpec
from benchmarks.simulation.profile import ModelProfile, make_profile
from benchmarks.simulation.profile import Profile as SimulatedProfile
from benchmarks.simulation.traffic import Request, streams
from benchmarks.stopwatch import Stopwatch
from kvstate.protocol import Admit, Admitted, Member, Members, Message, OpenRequest, Profile, ReplicaInfo, Sampling
from models.emulated import EmulateSpec
from router.service import RouterCore

DRAFTERS = (1, 2, 4, 8, 16, 32, 64)
STREAMS, PER_STREAM, TOKENS = 16, 8, 64
LARGE, NUM_AT_ONCE = (16, 48, 232), 2000
"""Drafters, replicas of each and of the target; requests that come together, to a router that knows nothing."""

NUM_TOLD, NUM_OPENED = 5, 200
LINK = LinkSpec(HOP_MS / 2.0)
DRAFTER_SPEC = EmulateSpec(agreement=0.0, errors="own", confidence_spread=0.2, base_ms=3.0, per_sequence_ms=0.1)
TARGET_SPEC = EmulateSpec(agreement=1.0, errors="own", base_ms=45.0, per_token_ms=ROW_MS)


@dataclass(frozen=True, slots=True)
class Served:
    """`cpu_s`: of the router; `hops`: steps answered."""

    results: list[Output]
    cpu_s: float
    hops: int

    @property
    def speed(self) -> str:
        """Of the machines, and what one processor lets the router serve."""
        num_tokens = sum(len(result.tokens) for result in self.results)
        return f"{tokens_per_s(self.results):,.0f} tokens/s; router {num_tokens / self.cpu_s:,.0f}"

    @property
    def cpu(self) -> str:
        per_request, per_hop = self.cpu_s * 1e3 / len(self.results), self.cpu_s * 1e6 / self.hops
        return f"{per_request:.0f} ms, {per_hop:.0f} µs of {self.hops / len(self.results):.0f} hops"


def profile_of(num_drafters: int, drafter_replicas: int = 1, target_replicas: int = 1) -> SimulatedProfile:
    """The i-th drafter is an expert in the i-th subject, in turn."""
    drafters = [
        ModelProfile(f"drafter-{i}", replace(DRAFTER_SPEC, agreement=agreement_of(i)), 1, drafter_replicas, LINK)
        for i in range(num_drafters)
    ]
    return make_profile((*drafters, ModelProfile(TARGET, TARGET_SPEC, 2, target_replicas, LINK)))


def scale(report: Report) -> None:
    runs = [*((number, PLAN_S) for number in DRAFTERS), (DRAFTERS[-1], 0.0)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (number, plan_s), served in zip(runs, pool.map(_with_drafters, *zip(*runs, strict=True)), strict=True):
            title = "" if plan_s else ", plans cost nothing"
            report.add(f"scale, drafters per verifier {number}{title}", served.speed)
            report.add("  router's processor time a request", served.cpu)
    served = run(_served(profile_of(*LARGE), NUM_AT_ONCE, 1, 0))
    report.add(f"scale, 1,000 replicas, {NUM_AT_ONCE:,} requests at once", served.speed)
    report.add("  router's processor time a request", served.cpu)
    for number in (100, 1_000, 10_000):
        told_ms, opened_ms = run(_without_replicas(number))
        report.add(f"scale, router alone, {number:,} replicas", f"{opened_ms:.2f} ms to open a request")
        report.add("  when it is told who is there, each second", f"{told_ms:.1f} ms")


def _with_drafters(number: int, plan_s: float) -> Served:
    return run(_served(profile_of(number), STREAMS, PER_STREAM, PER_STREAM, plan_s))


async def _served(
    profile: SimulatedProfile, number: int, per_stream: int, warming: int, plan_s: float = PLAN_S
) -> Served:
    cluster = SimulatedCluster(profile, plan_s=plan_s)

    def make(title: str, nth: int) -> Request:
        return Request(prompt_of(title, nth).encode(), TOKENS)

    if warming:
        await streams(cluster, number, warming, partial(make, "warm-up"))
    before_s, before_hops = _router_s(cluster), _hops(cluster)
    results = await streams(cluster, number, per_stream, partial(make, "measured"))
    after_s, after_hops = _router_s(cluster), _hops(cluster)
    await cluster.close()
    return Served(results, after_s - before_s, after_hops - before_hops)


async def _without_replicas(number: int) -> tuple[float, float]:
    """Of the router with nobody behind the names: ms to take in a membership, ms from a request to its first steps."""
    profile, sink = profile_of(16), Sink()
    router = RouterCore(profile.settings, sink, generation=1)
    names = [m.name for m in profile.models]
    replicas = [(f"{name}#{i}", name) for i in range(number // len(names) + 1) for name in names][:number]
    members = Members(tuple(_member(replica_id, name) for replica_id, name in replicas))
    router.on_coordinator(members)
    for replica_id, _ in replicas:
        router.replica_connected(replica_id)
    told, opened = Stopwatch(), Stopwatch()
    with told:
        for _ in range(NUM_TOLD):
            router.on_coordinator(members)
    for nth in range(NUM_OPENED):
        prompt = tuple(prompt_of("opened", nth).encode())
        with opened:
            router.on_ingress("ingress", OpenRequest(str(nth), prompt, Sampling(), TOKENS, (), 1e6))
            await asyncio.sleep(0.0)
            admit = sink.admits.pop()
            holders = {name: admit.preferred.get(name, (f"{name}#0",))[0] for name in admit.models}
            router.on_coordinator(Admitted(admit.seq, holders))
            for _ in range(3):  # until its first steps are sent
                await asyncio.sleep(0.0)
    await router.close()
    return told.total_s * 1e3 / NUM_TOLD, opened.total_s * 1e3 / NUM_OPENED


def _member(replica_id: str, model: str) -> Member:
    info = ReplicaInfo(replica_id, model, "here", "nowhere:1", "bytes", 4096, 16, 1 << 16, Profile(3.0))
    return Member(info, up=True, sequences=0, free_blocks=1 << 16)


class Sink:
    """An `Outbound` that keeps what asks for room and drops everything else."""

    def __init__(self) -> None:
        self.admits: list[Admit] = []

    def to_replica(self, replica_id: str, message: Message) -> bool:
        del replica_id, message
        return True

    def to_coordinator(self, message: Message) -> bool:
        if isinstance(message, Admit):
            self.admits.append(message)
        return True

    def to_ingress(self, ingress_id: str, message: Message) -> bool:
        del ingress_id, message
        return True


def _router_s(cluster: SimulatedCluster) -> float:
    return time.thread_time() - cluster.others.total_s


def _hops(cluster: SimulatedCluster) -> int:
    return sum(sum(histogram.counts) for histogram in cluster.router.stats.step_s.values())
