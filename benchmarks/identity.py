"""Is the text of every chain the target's? `python -m benchmarks.identity --config FILE --prompts FILE`.

Every chain of the config's models, the adaptive planner, a chain that changes within a request and one whose KV is
evicted all the time, greedy and seeded, alone and in batches. In float32 and float64 against `benchmarks.reference`,
where a near-tie is a first difference at which the reference's best token led by at most 1e-3, which the order of float
additions can turn. In bfloat16, int8 and int4, where two implementations round differently, against the target alone,
one request at a time, and nothing may differ. Fails if a text differs, if there is more than one near-tie, or if a
chain with drafts had none accepted or none rejected, which would prove nothing.
"""

import argparse
import asyncio
import itertools
import json
import math
import time
import weakref
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.inprocess import AUTO, InProcessCluster, Output, running
from benchmarks.reference import Reference, ReferenceText
from cluster.config import AppConfig, TransformersModel, load_config
from deployments.backends import build_backend, build_tokenizer
from kvstate.protocol import Sampling, Speculation
from models.backend import Backend
from models.engine import Engine
from router.plan import GROUP, Plan
from router.settings import RouterSettings

THREADS = 2
MOST_PROMPT_CHARACTERS = 1500
NEAR_TIE = 1e-3
MOST_NEAR_TIES = 1
SWITCH_ROUNDS = 5
EVICT_S = 3.0
DEADLINE_S = 1800.0
AHEAD = ", tree, ahead"
"""Windows are planned: drafts are trees then, and go on while they are checked."""

QUANTIZED = ("int8", "int4")
ROUNDED = ("bfloat16", *QUANTIZED)
TEMPERATURES = {"greedy": 0.0, "seeded": 0.8}
OFF = Speculation("off")
Texts = dict[str, list[ReferenceText]]
"""By mode and prompt."""


@dataclass(frozen=True, slots=True)
class Row:
    """`switching`: the fixed plans that take turns within each request."""

    name: str
    speculation: Speculation
    has_drafts: bool = False
    switching: tuple[Speculation, ...] = ()
    evicting: bool = False


@dataclass(slots=True)
class Counts:
    equal: int = 0
    near_tie: int = 0
    different: int = 0
    accepted: int = 0
    rejected: int = 0

    def add(self, name: str, output: Output, wanted: ReferenceText) -> None:
        verdict = compare(output.tokens, wanted)
        if verdict != "equal":
            print(f"  {name}: {first_difference(output.tokens, wanted)}", flush=True)
        self.equal += verdict == "equal"
        self.near_tie += verdict == "near-tie"
        self.different += verdict == "different"
        assert output.metrics is not None, "the last part carries the metrics"
        self.accepted += output.metrics.accepted_draft_tokens
        self.rejected += output.metrics.draft_tokens - output.metrics.accepted_draft_tokens


def compare(tokens: Sequence[int], wanted: ReferenceText) -> str:
    """equal, near-tie or different."""
    if tuple(tokens) == wanted.tokens:
        return "equal"
    first = _first_index(tokens, wanted)
    near = first < min(len(tokens), len(wanted.tokens)) and wanted.margins[first] <= NEAR_TIE
    return "near-tie" if near else "different"


def first_difference(tokens: Sequence[int], wanted: ReferenceText) -> str:
    """Where unequal texts part, and by how much the reference's token led there."""
    first = _first_index(tokens, wanted)
    if first >= min(len(tokens), len(wanted.tokens)):
        return f"lengths differ, {len(tokens)} tokens for {len(wanted.tokens)}"
    return f"token {first} is {tokens[first]}, not {wanted.tokens[first]}, which led by {wanted.margins[first]:.2g}"


def _first_index(tokens: Sequence[int], wanted: ReferenceText) -> int:
    pairs = itertools.zip_longest(tokens, wanted.tokens)
    return next(i for i, (got, want) in enumerate(pairs) if got != want)


def rows_of(levels: Mapping[str, int]) -> list[Row]:
    """`levels` of the models, cheapest first, target last."""
    *drafters, target = models = list(levels)
    chains: list[tuple[str, ...]] = [(name, target) for name in drafters]
    first = [name for name in drafters if levels[name] == levels[drafters[0]]]
    if len(first) > 1:
        chains += [(GROUP.join(first), target)]
    elif len(drafters) > 1:
        chains += [tuple(models)]
    fixed = [Speculation("fixed", chain, (3, *range(6, 3 * len(chain), 3))[: len(chain) - 1]) for chain in chains]
    rows = [Row("target", OFF), *(Row("→".join(wish.chain), wish, has_drafts=True) for wish in fixed)]
    planned = [Speculation("fixed", chain) for chain in chains if len(chain) == 2]
    rows += [Row(f"{'→'.join(wish.chain)}{AHEAD}", wish, has_drafts=True) for wish in planned]
    evicting = Row("evicting", fixed[-1] if fixed else OFF, has_drafts=bool(fixed), evicting=True)
    rows += [Row("adaptive", AUTO), evicting]
    return [*rows, Row("switching", AUTO, has_drafts=True, switching=(*fixed, OFF))] if fixed else rows


@contextmanager
def switching(cluster: InProcessCluster, wishes: Sequence[Speculation]) -> Iterator[None]:
    """Every request goes on to the next of `wishes` after SWITCH_ROUNDS plans; the router has one task per request."""
    planning = cluster.router.planning
    plan = planning.plan
    rounds: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()

    def plan_next(holders: Sequence[str], _: Speculation, *others: Any) -> Plan:
        task = asyncio.current_task()
        assert task is not None
        rounds[task] = rounds.get(task, -1) + 1
        return plan(holders, wishes[rounds[task] // SWITCH_ROUNDS % len(wishes)], *others)

    with patch.object(planning, "plan", plan_next):
        yield


@asynccontextmanager
async def evicting(cluster: InProcessCluster, every_s: float = EVICT_S) -> AsyncIterator[None]:
    """The KV of every sequence on every engine is given up again and again."""

    def evict_all(engine: Engine) -> None:
        for held in engine.held():
            engine.evict(held.seq)

    async def go_on() -> None:
        while True:
            await asyncio.sleep(every_s)
            for engine in cluster.engines.values():
                engine.control(partial(evict_all, engine))

    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        task.cancel()


class Bench:
    """`prompts`: token ids; `wanted[mode][i]`: the reference's text for prompt i."""

    def __init__(
        self,
        cluster: InProcessCluster,
        prompts: Sequence[Sequence[int]],
        wanted: Mapping[str, Sequence[ReferenceText]],
        max_tokens: int,
        stop_ids: Sequence[int],
    ) -> None:
        self._cluster = cluster
        self._prompts = prompts
        self._wanted = wanted
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids

    async def run(self, row: Row, mode: str, concurrency: int) -> Counts:
        """All prompts, `concurrency` at a time; they repeat where there are fewer."""
        counts = Counts()
        requests = iter([i % len(self._prompts) for i in range(max(concurrency, len(self._prompts)))])

        async def worker() -> None:
            for index in requests:
                sampling = Sampling(TEMPERATURES[mode], seed=index)
                output = await self._cluster.generate(
                    self._prompts[index], sampling, self._max_tokens, self._stop_ids, row.speculation, DEADLINE_S
                )
                counts.add(f"prompt {index}", output, self._wanted[mode][index])

        async with AsyncExitStack() as faults:
            if row.switching:
                faults.enter_context(switching(self._cluster, row.switching))
            if row.evicting:
                await faults.enter_async_context(evicting(self._cluster))
            await asyncio.gather(*(worker() for _ in range(concurrency)))
        return counts


def read_prompts(path: Path, limit: int) -> list[str]:
    """The first turns of the first `limit` lines that are short enough."""
    texts = [json.loads(line)["turns"][0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    short: list[str] = []
    skipped = 0
    for text in texts:
        if len(short) == limit:
            break
        if len(text) > MOST_PROMPT_CHARACTERS:
            skipped += 1
        else:
            short.append(text)
    print(f"{len(short)} prompts, {skipped} skipped: over {MOST_PROMPT_CHARACTERS} characters", flush=True)
    return short


def with_dtype(config: AppConfig, dtype: str) -> AppConfig:
    """int8 and int4 are the target's quantization; the others compute in bfloat16."""
    quantization = dtype if dtype in QUANTIZED else "none"
    changes = {"dtype": "bfloat16" if dtype in QUANTIZED else dtype}
    models = [m.model_copy(update=changes) if isinstance(m, TransformersModel) else m for m in config.models]
    at = config.models.index(config.target)
    models[at] = models[at].model_copy(update={"quantization": quantization})
    return config.model_copy(update={"models": type(config.models)(models)})


def by_transformers(
    config: AppConfig, dtype: str, prompts: Sequence[Sequence[int]], max_tokens: int, stop_ids: Collection[int]
) -> Texts:
    target = config.target
    assert isinstance(target, TransformersModel), "the target must have weights"
    reference = Reference(target.source, target.revision, getattr(torch, dtype))
    return {
        mode: [reference.generate(p, temperature, i, max_tokens, stop_ids) for i, p in enumerate(prompts)]
        for mode, temperature in TEMPERATURES.items()
    }


async def by_target_alone(
    target: Mapping[str, Backend], prompts: Sequence[Sequence[int]], max_tokens: int, stop_ids: Sequence[int]
) -> Texts:
    texts: Texts = {}
    async with running(target) as cluster:
        for mode, temperature in TEMPERATURES.items():
            texts[mode] = []
            for i, prompt in enumerate(prompts):
                sampling = Sampling(temperature, seed=i)
                output = await cluster.generate(prompt, sampling, max_tokens, stop_ids, OFF, DEADLINE_S)
                texts[mode].append(ReferenceText(tuple(output.tokens), (math.inf,) * len(output.tokens)))
    return texts


async def compare_all(args: argparse.Namespace) -> int:
    """The exit code."""
    config = with_dtype(load_config(args.config), args.dtype)
    tokenizer = build_tokenizer(config)
    texts = read_prompts(args.prompts, args.limit)
    prompts = [tokenizer.render_chat([{"role": "user", "content": text}]) for text in texts]
    stop_ids = tuple(tokenizer.stop_ids)
    backends = {name: build_backend(config, name) for name in sorted(config.levels, key=config.levels.__getitem__)}
    torch.set_num_threads(THREADS)
    if args.dtype in ROUNDED:
        name = config.target.name
        wanted = await by_target_alone({name: backends[name]}, prompts, args.tokens, stop_ids)
    else:
        wanted = by_transformers(config, args.dtype, prompts, args.tokens, stop_ids)
    differing = sum(g.tokens != s.tokens for g, s in zip(wanted["greedy"], wanted["seeded"], strict=True))
    print(f"{differing} of {len(prompts)} seeded reference texts differ from the greedy ones", flush=True)
    print(f"{'chain':44} mode   batch equal near different accepted rejected seconds", flush=True)
    near_ties, failed = 0, False
    names = [model.name for model in config.models]
    settings = RouterSettings(tuple(names), tuple(config.levels[name] for name in names))
    async with running({name: backends[name] for name in names}, settings) as cluster:
        bench = Bench(cluster, prompts, wanted, args.tokens, stop_ids)
        rows = [row for row in rows_of(config.levels) if args.row in (None, row.name)]
        for row, mode, size in itertools.product(rows, args.modes, args.concurrency):
            began_s = time.monotonic()
            counts = await bench.run(row, mode, size)
            print_row(row, mode, size, counts, time.monotonic() - began_s)
            near_ties += counts.near_tie
            failed |= counts.different > 0 or (row.has_drafts and 0 in (counts.accepted, counts.rejected))
        evicted = sum(engine.stats.evicted_sequences for engine in cluster.engines.values())
        cached = sum(engine.stats.cached_tokens for engine in cluster.engines.values())
    print(f"{evicted} times a sequence's KV was evicted, {cached} tokens came from the prefix cache")
    failed |= near_ties > MOST_NEAR_TIES
    print(f"{'FAILED' if failed else 'passed'}: {near_ties} near-ties in all", flush=True)
    return int(failed)


def print_row(row: Row, mode: str, size: int, counts: Counts, seconds: float) -> None:
    verdicts = f"{counts.equal:5} {counts.near_tie:4} {counts.different:9}"
    print(
        f"{row.name:44} {mode} {size:5} {verdicts} {counts.accepted:8} {counts.rejected:8} {seconds:7.1f}", flush=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float64", "float32", *ROUNDED])
    parser.add_argument("--limit", default=12, type=int)
    parser.add_argument("--tokens", default=96, type=int)
    parser.add_argument("--concurrency", default=[1, 8], type=int, nargs="+")
    parser.add_argument("--row", help="only the row of this name, as printed")
    parser.add_argument("--modes", default=list(TEMPERATURES), choices=list(TEMPERATURES), nargs="+")
    torch.set_num_threads(THREADS)
    return asyncio.run(compare_all(parser.parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
