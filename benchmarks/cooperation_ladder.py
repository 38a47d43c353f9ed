"""Part `ladder`: real actors, what routing, fusion, trees and drafting ahead each gain; the same simulated.

The stages take turns over the same prompts; between turns the router's settings are changed live.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean

from benchmarks.client import Answer
from benchmarks.emulated_app import EmulatedApp, emulated_app, emulated_config
from benchmarks.emulated_client import AUTO, EmulatedClient, Wish, emulated_client
from benchmarks.experts import FULL, LADDER, LEVELS, NAMES, ORACLE, Stage, emulate, prompt_of
from benchmarks.joined import Output
from benchmarks.report import Report
from benchmarks.simulation.clock import run
from benchmarks.simulation.cluster import SimulatedCluster
from benchmarks.simulation.links import LinkSpec
from benchmarks.simulation.profile import ModelProfile, Profile, make_profile
from benchmarks.simulation.traffic import Request as SimulatedRequest
from benchmarks.simulation.traffic import streams
from benchmarks.traffic import Request, steady, times_of
from models.emulated import EmulateSpec

WARM_UP = 100
TOKENS = 96
TURNS, PER_TURN = 6, 4
STAGES = {**LADDER, "oracle": ORACLE}
MOST_ABOVE_ORACLE = 1.05
MOST_SIMULATION_ERROR = 0.07


def wish_of(stage: Stage, number: int) -> Wish:
    speculation = stage.speculation(number)
    return AUTO if stage.picks is None else {"mode": "fixed", "chain": list(speculation.chain)}


async def ladder(report: Report, concurrency: int) -> None:
    config = emulated_config("cooperation", emulate(), levels=LEVELS)
    with emulated_app(config) as app:
        async with emulated_client(app) as client:
            hop_ms = await client.hop_ms(TOKENS, 3)
            report.add("ladder: a hop", f"{hop_ms:.2f} ms")
            answers = await _measured(client, app, concurrency)
    real = {name: times_of(of_stage).mean for name, of_stage in answers.items()}
    lengths = {name: fmean(a.metrics["mean_acceptance_length"] for a in of) for name, of in answers.items()}
    before = None
    for name in LADDER:
        gain = "" if before is None else f"{1.0 - real[name] / before:+.1%}"
        met = None if before is None else real[name] < before
        figure = f"{real[name]:.2f} ms, {lengths[name]:.2f} tokens a check"
        report.add(f"ladder {concurrency}: {name}", figure, f"gains: {gain}" if gain else "", met)
        before = real[name]
    above = real["routed"] / real["oracle"]
    figure = f"{real['routed']:.2f}, {real['oracle']:.2f} ms"
    report.add(f"ladder {concurrency}: routed, oracle", figure, f"≤ 1.05×: {above:.3f}", above <= MOST_ABOVE_ORACLE)
    simulated = await asyncio.to_thread(run, _simulated(profile_of(hop_ms), concurrency))
    for name, results in simulated.items():
        error = fmean(r.ms_per_token for r in results) / real[name] - 1.0
        met = abs(error) <= MOST_SIMULATION_ERROR
        figure = f"{fmean(r.ms_per_token for r in results):.2f} ms"
        report.add(f"ladder {concurrency}: {name}, simulated", figure, f"≤ 7 %: {error:+.1%}", met)


async def _measured(client: EmulatedClient, app: EmulatedApp, concurrency: int) -> dict[str, list[Answer]]:
    await app.change_router(FULL)
    await steady(client, concurrency, WARM_UP // concurrency, lambda n: Request(prompt_of("warm-up", n), TOKENS, AUTO))
    answers: dict[str, list[Answer]] = {name: [] for name in STAGES}
    for turn in range(TURNS):
        for name, stage in _turned(turn):
            await app.change_router(stage.router)
            answers[name] += await steady(client, concurrency, PER_TURN, partial(_request, turn, stage))
    return answers


def _turned(turn: int) -> Sequence[tuple[str, Stage]]:
    """The stages, another one first in each turn."""
    items = list(STAGES.items())
    return [*items[turn % len(items) :], *items[: turn % len(items)]]


def _request(turn: int, stage: Stage, number: int) -> Request:
    return Request(prompt_of(f"turn {turn}", number), TOKENS, wish_of(stage, number))


def profile_of(hop_ms: float, errors: str = "own", target_row_ms: float = 0.0) -> Profile:
    """The same models; a hop is there and back."""
    link = LinkSpec(hop_ms / 2.0)
    specs = emulate(errors, target_row_ms)
    models = (ModelProfile(name, EmulateSpec(**specs[name]), LEVELS[name], link=link) for name in NAMES)
    return make_profile(tuple(models), **FULL)


async def _simulated(profile: Profile, concurrency: int) -> Mapping[str, list[Output]]:
    """As `_measured`."""
    cluster = SimulatedCluster(profile)
    await streams(
        cluster,
        concurrency,
        WARM_UP // concurrency,
        lambda n: SimulatedRequest(prompt_of("warm-up", n).encode(), TOKENS),
    )
    results: dict[str, list[Output]] = {name: [] for name in STAGES}
    for turn in range(TURNS):
        for name, stage in _turned(turn):
            cluster.router.change(profile.with_settings(**stage.router).settings)

            def make(number: int, turn: int = turn, stage: Stage = stage) -> SimulatedRequest:
                prompt = prompt_of(f"turn {turn}", number).encode()
                return SimulatedRequest(prompt, TOKENS, stage.speculation(number))

            results[name] += await streams(cluster, concurrency, PER_TURN, make)
    await cluster.close()
    return results
