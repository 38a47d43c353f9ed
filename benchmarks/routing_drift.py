"""Part `drift`: values change in the middle of traffic; how soon adaptive is as fast as the best plan then.

One stream. A first cycle through all changes warms up, and is what the plot shows. After each later change, requests
that began once 64 rounds had passed are compared with the same prompts asked with the best static plan of the new
values; nothing else runs meanwhile.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.emulated_app import emulated_app, emulated_config
from benchmarks.emulated_client import OFF, EmulatedClient, emulated_client
from benchmarks.oracle import best_of_chains
from benchmarks.report import Report
from benchmarks.round_log import Asked, RoundLog, ms_per_token, quantile
from benchmarks.routing_plot import Trace, draw
from benchmarks.static_search import StaticPlan, halving
from benchmarks.traffic import Request, steady, times_of

EMULATE: dict[str, dict[str, Any]] = {
    "light": {"base_ms": 4.0, "agreement": 0.9},
    "middle": {"base_ms": 5.0, "agreement": 0.8},
    "target": {"base_ms": 40.0, "agreement": 1.0},
}
CHANGED = "light"
CHANGES: dict[str, dict[str, Any]] = {
    "agreement .9 → .1": {"agreement": 0.1},
    "agreement .1 → .9": {"agreement": 0.9},
    "base_ms 4 → 12": {"base_ms": 12.0},
    "base_ms 12 → 4": {"base_ms": 4.0},
}
ADVERSE = ("agreement .9 → .1", "base_ms 4 → 12")
TOKENS = 64
SETTLED_ROUNDS = 64
PLOTTED_ROUNDS = 150
REQUESTS = 5
CYCLES = 2
POLL_S = 0.25
SPANS = ((0, 16), (16, 32), (32, 64))


@dataclass(slots=True)
class Seen:
    """Of one kind of change, over all cycles: ms per token by request, and rounds after the change by span."""

    adaptive: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    spans: dict[tuple[int, int], list[float]] = field(default_factory=lambda: {span: [] for span in SPANS})


@dataclass(slots=True)
class _Drift:
    client: EmulatedClient
    report: Report
    seen: dict[str, Seen] = field(default_factory=lambda: {name: Seen() for name in CHANGES})
    plans: dict[str, StaticPlan] = field(default_factory=dict)
    off: list[float] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)

    async def search(self, hop_ms: float) -> None:
        """The oracle's best two for the values after each change, tried; the values end as they began."""
        for name, values in CHANGES.items():
            await self._change(values)
            names = self.client.names
            found = sorted(
                best_of_chains(self.client.levels(hop_ms), 16, "shared", 3_000, 0), key=lambda b: b.ms_per_token
            )
            plans = [StaticPlan(tuple(names[i] for i in best.chain), best.windows) for best in found[:2]]
            self.plans[name] = (await halving(plans, self._trial, 2, 1))[0]

    async def _trial(self, plan: StaticPlan, turn: int) -> float:
        def request(number: int) -> Request:
            return Request(f"drift search {number}", TOKENS, plan.wish)

        return times_of(await steady(self.client, 1, 1 + turn, request)).mean

    async def _change(self, values: dict[str, Any]) -> float:
        """Serve is told at once as well; `deploy` waits for it, so it waits in a thread of its own."""
        changed_s = await self.client.app.change_now(CHANGED, values)
        await asyncio.to_thread(self.client.app.deploy, {})
        return changed_s

    async def plotted_cycle(self) -> Trace:
        log, until, trace = RoundLog(), asyncio.Event(), Trace()
        async with asyncio.TaskGroup() as group:
            group.create_task(log.ask_on(self.client, "drift plotted", TOKENS, until))
            group.create_task(self._watch(trace, until))
            await log.until_rounds(PLOTTED_ROUNDS)
            for values in CHANGES.values():
                now = ", ".join(f"{key} {value:g}" for key, value in values.items())
                trace.changes.append((await self._change(values), now))
                await log.until_rounds(len(log.rounds) + PLOTTED_ROUNDS)
            until.set()
        trace.rounds = log.rounds
        self.asked += log.requests
        return trace

    async def _watch(self, trace: Trace, until: asyncio.Event) -> None:
        while not until.is_set():
            trace.take(await self.client.table())
            await asyncio.sleep(POLL_S)

    async def cycle(self, number: int) -> None:
        for name, values in CHANGES.items():
            log, until = RoundLog(), asyncio.Event()
            async with asyncio.TaskGroup() as group:
                group.create_task(log.ask_on(self.client, f"drift {number} {name}", TOKENS, until))
                await log.until_rounds(SETTLED_ROUNDS // 2)
                before = len(log.rounds)
                changed_s = await self._change(values)
                fresh = next((i for i, r in enumerate(log.rounds) if r.end_s > changed_s), before)
                late = await log.until_requests(fresh + SETTLED_ROUNDS, REQUESTS)
                until.set()
            self.asked += log.requests
            seen = self.seen[name]
            for first, last in SPANS:
                seen.spans[first, last].append(ms_per_token(log.rounds[fresh + first : fresh + last]))
            adaptive = [request.answer.ms_per_token for request in late]
            best = [(await self.client.ask(r.prompt, TOKENS, self.plans[name].wish)).ms_per_token for r in late]
            seen.adaptive += adaptive
            seen.best += best
            self.off.append((await self.client.ask(late[0].prompt, TOKENS, OFF)).ms_per_token)
            ratio, chain = fmean(adaptive) / fmean(best), "→".join(late[-1].answer.metrics["chain"])
            print(f"  cycle {number}, {name}: {ratio:.3f}, last by {chain}", flush=True)

    def tell(self) -> None:
        for name, seen in self.seen.items():
            best = fmean(seen.best)
            spans = ", ".join(
                f"{fmean(values) / best:.2f}× in {first + 1}–{last}" for (first, last), values in seen.spans.items()
            )
            self.report.add(f"drift {name}: rounds after it", spans)
            ratio = fmean(seen.adaptive) / best
            met = ratio <= 1.07 if name in ADVERSE else None
            figure = f"{fmean(seen.adaptive):.2f}, {best:.2f} ms"
            title = f"drift {name}: adaptive, then {self.plans[name]}"
            self.report.add(title, figure, f"≤ 1.07×: {ratio:.3f}" if met is not None else f"{ratio:.3f}", met)
        p99, off = quantile([r.answer.ms_per_token for r in self.asked], 0.99), median(self.off)
        self.report.add(
            f"drift: p99 of {len(self.asked)} requests of {TOKENS} tokens; target only",
            f"{p99:.2f}, {off:.2f} ms",
            f"≤ 1.10×: {p99 / off:.3f}",
            p99 <= 1.10 * off,
        )


async def drift(report: Report, plot: Path | None) -> None:
    with emulated_app(emulated_config("routing-drift", EMULATE)) as app:
        async with emulated_client(app) as client:
            part = _Drift(client, report)
            await part.search(await client.hop_ms(TOKENS, 3))
            trace = await part.plotted_cycle()
            if plot is not None:
                draw(trace, plot)
            report.add("drift: warm-up of adaptive", f"{len(trace.rounds)} rounds, all changes once")
            for number in range(CYCLES):
                await part.cycle(number)
            part.tell()
