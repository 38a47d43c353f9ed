"""Part `none`: where speculation does not pay, what the router loses by looking whether it does."""

from typing import Any

from benchmarks.emulated_app import emulated_app, emulated_config
from benchmarks.emulated_client import AUTO, OFF, EmulatedClient, emulated_client
from benchmarks.report import Report
from benchmarks.traffic import Request, always, in_turn, numbered, steady, times_of

NAMES = ("light", "middle", "heavy")
USELESS: dict[str, dict[str, Any]] = {
    "light": {"base_ms": 2.0, "agreement": 0.02},
    "middle": {"base_ms": 6.0, "agreement": 0.02},
    "heavy": {"base_ms": 15.0, "agreement": 0.02},
    "target": {"base_ms": 40.0, "agreement": 1.0},
}
BUSY: dict[str, dict[str, Any]] = {
    "light": {"base_ms": 2.0, "agreement": 0.6},
    "middle": {"base_ms": 6.0, "agreement": 0.7},
    "heavy": {"base_ms": 15.0, "agreement": 0.8},
    "target": {"base_ms": 20.0, "per_token_ms": 6.0, "agreement": 1.0},
}
"""A row of the target costs 6 ms however full its batch: 64 sequences take 404 ms, and each draft as much again."""
FEW, MANY = 4, 64
FEW_TOKENS, MANY_TOKENS = 64, 24


async def none(report: Report) -> None:
    with emulated_app(emulated_config("routing-none", USELESS)) as app:
        async with emulated_client(app) as client:
            await _against_off(client, report, "agreement .02", FEW, FEW_TOKENS, 10, 1.05)
    with emulated_app(emulated_config("routing-none-busy", BUSY)) as app:
        async with emulated_client(app) as client:
            await _against_off(client, report, f"{MANY} at once, compute-bound", MANY, MANY_TOKENS, 5, 1.03)


async def _against_off(
    client: EmulatedClient, report: Report, title: str, concurrency: int, tokens: int, turns: int, limit: float
) -> None:
    def warming(number: int) -> Request:
        return Request(f"none {title} warm-up {number}", tokens, AUTO)

    warm_up = await steady(client, concurrency, 2, warming)
    report.add(f"none, {title}: warm-up of adaptive", f"{len(warm_up)} requests of {tokens} tokens")
    wishes = {"adaptive": always(AUTO), "off": always(OFF)}
    answers, busy = await in_turn(client, concurrency, wishes, numbered(f"none {title}", turns), tokens, 1)
    adaptive, off = times_of(answers["adaptive"]), times_of(answers["off"])
    ratio = adaptive.mean / off.mean
    target = f"≤ {limit:.2f}×: {ratio:.3f}"
    report.add(f"none, {title}: adaptive, off", f"{adaptive.mean:.2f}, {off.mean:.2f} ms", target, ratio <= limit)
    checked = sum(answer.metrics["num_draft_tokens"] for answer in answers["adaptive"])
    table = await client.table()
    share, rows_ms = table["explore_share"], table["models"][-1]["per_token_ms"]
    of_request = f"{checked / len(answers['adaptive']):.1f} of {tokens} tokens; {rows_ms:.2f} ms"
    report.add(f"none, {title}: drafts checked; a target's row in the table", of_request)
    report.add(f"none, {title}: probes", f"{share:.1%} of rounds", "≤ 5 %", share <= 0.05)
    report.add(f"none, {title}: processors busy", f"{busy:.0%}")
