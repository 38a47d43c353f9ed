"""Times and counts of a chain of emulated models, through Serve, actors and gRPC, against an oracle.

    python -m benchmarks.emulated --config configs/emulated.yaml

Exit code 1 where a figure falls short of its target. docs/benchmarks.md says how each figure is measured.
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.client import Answer, stream_completion
from benchmarks.emulated_app import EmulatedApp, emulated_app, ray_tasks
from benchmarks.emulated_client import AUTO, OFF, EmulatedClient, emulated_client, fixed
from benchmarks.inprocess import running
from benchmarks.oracle import best_by_length
from benchmarks.report import Report, standard_error
from cluster.config import load_config
from deployments.backends import build_backend
from kvstate.protocol import Commit, Message, Sampling, Speculation

NUM_TOKENS = 320
WARM_UP_REQUESTS = 8
KILL_TOKENS = 400
POLL_S = 0.01
RETURN_LIMIT_S = 60.0


@dataclass(slots=True)
class Bench:
    client: EmulatedClient
    report: Report
    tokens: int
    repeats: int

    @property
    def app(self) -> EmulatedApp:
        return self.client.app

    # ---------------------------------------------------------------------------------------------- time per token

    async def times(self, title: str, hop_ms: float) -> None:
        """Adaptive first learns from whole requests; then all are measured in turn, so that drift hits all alike."""
        names = self.client.names
        best = best_by_length(self.client.levels(hop_ms), num_tokens=2_000)
        wishes = {0: AUTO}
        for length, plan in best.items():
            wishes[length] = fixed([names[i] for i in plan.chain], plan.windows)
        started_s = time.perf_counter()
        for i in range(WARM_UP_REQUESTS):
            await self.client.ask(f"{title} warm-up {i}", self.tokens, AUTO)
        warm_up_s = time.perf_counter() - started_s
        measured: dict[int, list[float]] = {length: [] for length in wishes}
        adaptive_chain = ""
        for i in range(self.repeats):
            for length, wish in wishes.items():
                answer = await self.client.ask(f"{title} {i}", self.tokens, wish)
                measured[length].append(answer.ms_per_token)
                adaptive_chain = " ".join(answer.metrics.get("chain", [])) if length == 0 else adaptive_chain
        means = {length: statistics.fmean(values) for length, values in measured.items()}
        spread = {length: standard_error(values) for length, values in measured.items()}
        for length, plan in best.items():
            name = f"{title}: {'→'.join(wishes[length]['chain'])} {list(plan.windows)}"
            error = means[length] / plan.ms_per_token - 1
            figure = f"{means[length]:.2f} ± {spread[length]:.2f} ms, oracle {plan.ms_per_token:.2f}"
            self.report.add(name, figure, f"within 10 %: {error:+.1%}", abs(error) <= 0.10)
        fastest = min(means[length] for length in best)
        ratio = means[0] / fastest
        figure = f"{means[0]:.2f} ± {spread[0]:.2f} ms"
        self.report.add(f"{title}: adaptive ({adaptive_chain})", figure, f"≤ 1.05×: {ratio:.3f}", ratio <= 1.05)
        self.report.add(f"{title}: warm-up of adaptive", f"{WARM_UP_REQUESTS} requests, {warm_up_s:.0f} s")

    async def swap(self) -> None:
        """The agreements of the two middle levels, live; no process may change."""
        _, a, b, _ = (model.name for model in self.app.config.models)
        before = await self.app.replicas("pid")
        agreement = {a: self.app.emulate[b]["agreement"], b: self.app.emulate[a]["agreement"]}
        self.app.deploy({name: {"agreement": value} for name, value in agreement.items()})
        same = before == await self.app.replicas("pid")
        self.report.add("agreements swapped live, same processes", str(same), "True", same)

    # ------------------------------------------------------------------------------------------------------- counts

    async def counts(self) -> None:
        streams = 8
        await asyncio.gather(*(self.client.ask(f"stream {i}", self.tokens, AUTO) for i in range(streams)))
        stats = await self.app.replicas("stats")
        most = {model: values["most_sequences_in_forward"] for model, values in stats.items()}
        figure = " ".join(f"{model} {count}" for model, count in most.items())
        self.report.add(f"most sequences in one forward, {streams} streams", figure, "> 1", max(most.values()) > 1)
        short, few = await self._ray_calls(self.tokens // 8)
        long, many = await self._ray_calls(self.tokens * 2)
        figure = f"{short} in {few} rounds, {long} in {many}"
        seen = short > 0  # the proxy's call of the ingress: a counter that misses it is blind
        self.report.add("Ray calls of one request", figure, "equal, above 0", seen and short == long and many > few)

    async def _ray_calls(self, tokens: int) -> tuple[int, int]:
        """Calls that reached a deployment while one request ran, besides health checks; its rounds."""
        await asyncio.sleep(2.5)  # processes hand in their task events each second
        before = ray_tasks()
        answer = await self.client.ask("ray calls", tokens, OFF)
        await asyncio.sleep(2.5)
        fresh = ray_tasks() - before
        calls = sum(count for name, count in fresh.items() if "handle_request" in name)
        return calls, len(answer.arrivals) - 1

    # -------------------------------------------------------------------------------------------------- convergence

    async def convergence(self) -> None:
        """One stream over the target alone: the three others are off its chain, and get commits all the same."""
        request = asyncio.create_task(self.client.ask("lag", self.tokens, OFF))
        worst_s = await _worst_lag(request, lambda: self.app.call("KVCoordinator", "lags"))
        await request
        figure = f"{worst_s * 1e3:.0f} ms"
        self.report.add("commit acknowledged by all holders, off-chain ones too", figure, "≤ 250 ms", worst_s <= 0.25)

    async def dropped_frames(self) -> None:
        """The same cores in one process, where a message can be lost on purpose: each holder's every fifth commit."""
        names = [model.name for model in self.app.config.models]
        backends = {name: build_backend(self.app.config, name) for name in names}
        commits: Counter[str] = Counter()

        def lose(to: str, message: Message) -> bool:
            commits[to] += isinstance(message, Commit)
            return isinstance(message, Commit) and commits[to] % 5 == 0

        async with running(backends, lose=lose) as cluster:

            async def lags() -> list[dict[str, Any]]:
                return [asdict(lag) for lag in cluster.coordinator.lags(time.monotonic())]

            prompt, off = b"a lost frame", Speculation("off")
            request = asyncio.create_task(cluster.generate(prompt, Sampling(), self.tokens, (), off))
            worst_s = await _worst_lag(request, lags)
        figure = f"{worst_s * 1e3:.0f} ms, {sum(commits.values()) // 5} lost"
        self.report.add("the same after lost commits (one process)", figure, "≤ 250 ms", worst_s <= 0.25)

    async def coordinator_kill(self) -> None:
        """kill -9 in a stream that outlasts the restart; the text must be what an undisturbed stream gave."""
        pid = await self.app.call("KVCoordinator", "pid")
        prompt = "coordinator kill"
        watcher: asyncio.Task[float] | None = None
        killed_s, answer = 0.0, Answer()
        async for answer in stream_completion(self.client.http, self.client.body(prompt, KILL_TOKENS, OFF)):
            if watcher is None and len(answer.text) > 20:
                killed_s = time.perf_counter()
                os.kill(pid, signal.SIGKILL)
                watcher = asyncio.create_task(self._registered(killed_s))
        ended_s = time.perf_counter()
        assert watcher is not None
        back_s = await watcher
        outlasted = killed_s + back_s < ended_s
        figure = f"{back_s:.1f} s; stream went on {ended_s - killed_s:.1f} s"
        self.report.add("coordinator killed → all registered", figure, "stream outlasts", outlasted)
        undisturbed = await self.client.ask(prompt, KILL_TOKENS, OFF)
        same = undisturbed.text == answer.text
        self.report.add("text of that stream equals an undisturbed one", str(same), "True", same)
        await self.convergence()

    async def _registered(self, killed_s: float) -> float:
        wanted = {model.name for model in self.app.config.models}
        while time.perf_counter() - killed_s < RETURN_LIMIT_S:
            try:
                if set(await self.app.call("KVCoordinator", "registered")) == wanted:
                    return time.perf_counter() - killed_s
            except Exception as error:  # noqa: BLE001 - whatever a dead actor answers with
                print(f"  waiting: {type(error).__name__}", file=sys.stderr)
            await asyncio.sleep(POLL_S)
        return RETURN_LIMIT_S


async def _worst_lag(until: asyncio.Task[Any], lags: Callable[[], Awaitable[list[dict[str, Any]]]]) -> float:
    """Longest from seeing a committed length to seeing a holder acknowledge it; it polls, so a little too long."""
    since_s: dict[tuple[int, str], dict[int, float]] = {}
    worst_s = 0.0
    while not until.done():
        rows = {(lag["seq"], lag["model"]): lag for lag in await lags()}
        now_s = time.perf_counter()
        for key, pending in since_s.items():
            acked = rows[key]["acked_len"] if key in rows else sys.maxsize
            for length in [length for length in pending if length <= acked]:
                worst_s = max(worst_s, now_s - pending.pop(length))
        for key, lag in rows.items():
            since_s.setdefault(key, {}).setdefault(lag["committed_len"], now_s)
        await asyncio.sleep(POLL_S)
    return worst_s


async def measure(app: EmulatedApp, report: Report, tokens: int, repeats: int, parts: list[str]) -> None:
    async with emulated_client(app) as client:
        bench = Bench(client, report, tokens, repeats)
        if "times" in parts:
            hop_ms = await client.hop_ms(tokens, repeats)
            report.add("hop: an empty round", f"{hop_ms:.2f} ms")
            await bench.times("as configured", hop_ms)
            await bench.swap()
            await bench.times("swapped", hop_ms)
        if "counts" in parts:
            await bench.counts()
        if "convergence" in parts:
            await bench.convergence()
            await bench.dropped_frames()
            await bench.coordinator_kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, default=Path("configs/emulated.yaml"))
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="per measured request")
    parser.add_argument("--repeats", type=int, default=6, help="interleaved requests per chain")
    parts = ("times", "counts", "convergence")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    arguments = parser.parse_args()
    report = Report()
    print(f"machine: {len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}")
    with emulated_app(load_config(arguments.config)) as app:
        asyncio.run(measure(app, report, arguments.tokens, arguments.repeats, arguments.parts))
    return 1 if report.short else 0


if __name__ == "__main__":
    sys.exit(main())
