"""Part `pairs`: how well the router knows how far any two levels agree, those that never ran together included.

Errors are shared, so that two levels differ at a share |a − b| of positions. Each of several apps is fresh: its router
knows nothing at first.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.emulated_app import emulated_app, emulated_config
from benchmarks.emulated_client import AUTO, EmulatedClient, emulated_client
from benchmarks.oracle import Level, ms_per_token
from benchmarks.report import Report
from benchmarks.round_log import quantile
from benchmarks.static_search import StaticPlan, grid, halving
from benchmarks.traffic import Request, always, in_turn, numbered, steady, times_of
from router.plan import CASCADE

ROUNDS = 400
APPS = 3
TOKENS = 96
BASE_MS = (1.0, 2.0, 4.0, 7.0, 11.0, 30.0)
NAMES = ("one", "two", "three", "four", "five", "target")

MEETING: dict[str, dict[str, Any]] = {
    "light": {"base_ms": 1.5, "agreement": 0.62},
    "middle": {"base_ms": 15.0, "agreement": 0.9},
    "target": {"base_ms": 80.0, "agreement": 1.0},
}
"""Where nothing is known, light → target looks best; light → middle → target is."""
PAIR = ("light", "middle")
MOST_REQUESTS = 40
TURNS, PER_TURN = 4, 3


def random_agreements(seed: int) -> dict[str, dict[str, Any]]:
    rng = random.Random(seed)
    agreements = [*sorted(rng.uniform(0.1, 0.95) for _ in NAMES[1:]), 1.0]
    values = zip(NAMES, BASE_MS, agreements, strict=True)
    return {name: {"base_ms": base_ms, "agreement": agreement} for name, base_ms, agreement in values}


def divergence_errors(table: Mapping[str, Any], agreements: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """Of each pair of GET /router/table, its divergence less |a − b|."""
    return {
        (pair["lower"], pair["upper"]): pair["divergence"] - abs(agreements[pair["lower"]] - agreements[pair["upper"]])
        for pair in table["pairs"]
    }


async def pairs(report: Report) -> None:
    errors: list[float] = []
    for seed in range(APPS):
        errors += await _errors_of_app(report, seed)
    within = sum(error <= 0.05 for error in errors) / len(errors)
    figure = f"{within:.0%} of {len(errors)}; 95th percentile {quantile(errors, 0.95):.3f}"
    report.add(f"pairs: divergence within .05 after {ROUNDS} rounds", figure, "≥ 95 %", within >= 0.95)
    report.add("pairs: largest error", f"{max(errors):.3f}", "≤ .10", max(errors) <= 0.10)
    await _meeting(report)


def pairs_of(chain: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Whose tokens are checked by whom; a cascade's both drafters by the next level."""
    for lower, upper in pairwise(chain):
        for name in lower.split(CASCADE):
            yield name, upper


async def _errors_of_app(report: Report, seed: int) -> list[float]:
    emulate = random_agreements(seed)
    with emulated_app(emulated_config(f"routing-pairs-{seed}", emulate)) as app:
        async with emulated_client(app) as client:
            rounds = requests = 0
            while rounds < ROUNDS:
                answer = await client.ask(f"pairs {requests}", TOKENS, AUTO)
                rounds, requests = rounds + answer.metrics["rounds"], requests + 1
            table = await client.table()
    found = divergence_errors(table, {name: values["agreement"] for name, values in emulate.items()})
    worst = max(found, key=lambda pair: abs(found[pair]))
    samples = {(pair["lower"], pair["upper"]): pair["samples"] for pair in table["pairs"]}
    ran = {pair for row in table["candidates"] if row["rounds"] for pair in pairs_of(row["chain"])}
    report.add(
        f"pairs, app {seed}: {rounds} rounds, {len(found) - len(ran & set(found))} of {len(found)} pairs never ran",
        f"worst {'→'.join(worst)} {found[worst]:+.3f}, {samples[worst]} samples",
    )
    never = [abs(error) for pair, error in found.items() if pair not in ran]
    if never:
        report.add(f"pairs, app {seed}: those that never ran", f"largest error {max(never):.3f}")
    return [abs(error) for error in found.values()]


async def _meeting(report: Report) -> None:
    """A pair is chosen whose levels never worked together, and is faster than anything without it."""
    with emulated_app(emulated_config("routing-pairs-meeting", MEETING)) as app:
        async with emulated_client(app) as client:
            await _until_chosen(client, report)
            best = await _best_without(client)
            wishes = {"adaptive": always(AUTO), "without": always(best.wish)}
            answers, _ = await in_turn(client, 1, wishes, numbered("meeting", TURNS), TOKENS, PER_TURN)
            adaptive, without = (times_of(answers[name]).mean for name in wishes)
            figure = f"{adaptive:.2f}, {without:.2f} ms"
            title = f"pairs: adaptive with {'→'.join(PAIR)}, best without ({best})"
            report.add(title, figure, f"< 1×: {adaptive / without:.3f}", adaptive < without)


def rounds_of_pair(table: Mapping[str, Any], pair: tuple[str, str]) -> int:
    """Of all chains in which the two are neighbours."""
    return sum(row["rounds"] for row in table["candidates"] if pair in pairs_of(row["chain"]))


async def _until_chosen(client: EmulatedClient, report: Report) -> None:
    """The table is read between requests: the last one in which the pair had not run yet tells what was known of it."""
    before = await client.table()
    requests = rounds = 0
    while rounds_of_pair(table := await client.table(), PAIR) == 0 and requests < MOST_REQUESTS:
        before, requests = table, requests + 1
        answer = await client.ask(f"meeting warm-up {requests}", TOKENS // 8, AUTO)
        rounds += answer.metrics["rounds"]
    known = next(pair for pair in before["pairs"] if (pair["lower"], pair["upper"]) == PAIR)
    truth = 1.0 - abs(MEETING[PAIR[0]]["agreement"] - MEETING[PAIR[1]]["agreement"])
    figure = f"{known['acceptance']:.2f} (true {truth:.2f}), {known['samples']} samples"
    ran = rounds_of_pair(table, PAIR) > 0
    report.add(f"pairs: known of {'→'.join(PAIR)} before it ran", figure)
    report.add("pairs: it ran after", f"{rounds} rounds" if ran else "never", f"< {ROUNDS} rounds", ran)


async def _best_without(client: EmulatedClient) -> StaticPlan:
    def oracle_ms(plan: StaticPlan) -> float:
        levels = [Level(MEETING[name]["base_ms"], MEETING[name]["agreement"], hop_ms=2.0) for name in plan.chain]
        return ms_per_token(levels, plan.windows, num_tokens=3_000)

    async def trial(plan: StaticPlan, turn: int) -> float:
        def request(number: int) -> Request:
            return Request(f"meeting search {turn} {number}", TOKENS, plan.wish)

        return times_of(await steady(client, 1, 1 + turn, request)).mean

    plans = [plan for plan in grid(client.names) if PAIR not in set(pairwise(plan.chain))]
    return (await halving(sorted(plans, key=oracle_ms)[:4], trial, 2, 1))[0]
