"""Drafters of one level together, over the joined cores: the text is the target's whatever they propose."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Literal

import pytest

from benchmarks.inprocess import InProcessCluster, running
from benchmarks.joined import Output
from benchmarks.simulation.clock import run
from benchmarks.simulation.cluster import SimulatedCluster
from benchmarks.simulation.profile import ModelProfile, make_profile
from benchmarks.simulation.traffic import Request, streams
from kvstate.protocol import Sampling, Speculation
from models.backend import Backend
from models.emulated import EmulatedBackend, EmulateSpec
from router.drafting import Drafters
from router.own_rates import OwnRates
from router.settings import RouterSettings
from router.subjects import words_of

GREEDY = Sampling()
PROMPTS = [b"Hello world", b"The quick brown fox", b"code: x", b"math: 2 + 2"]
NAMES = ("a", "b", "c", "t")
SETTINGS = RouterSettings(NAMES, levels=(1, 1, 1, 2))
TOGETHER = Speculation("fixed", ("a|b|c", "t"), (5,))
PLANNED = Speculation("fixed", ("a|b|c", "t"))
"""With windows that are planned a draft may be a tree, and go on while it is checked."""

ALONE_PLANNED = Speculation("fixed", ("a", "t"))


def drafters(
    errors: Literal["own", "shared"] = "own", base_ms: float = 0.3, target_ms: float = 0.3, eos_after: int | None = None
) -> dict[str, Backend]:
    specs = {
        name: EmulateSpec(base_ms, agreement, errors=errors, confidence_spread=0.2, eos_after=eos_after)
        for name, agreement in zip("abc", (0.8, 0.7, 0.5), strict=True)
    }
    specs["t"] = EmulateSpec(target_ms, 1.0, errors=errors, eos_after=eos_after)
    return {name: EmulatedBackend(name, rank, spec, 512) for rank, (name, spec) in enumerate(specs.items())}


async def alone(cluster: InProcessCluster, prompt: bytes, max_tokens: int) -> list[int]:
    return (await cluster.generate(prompt, GREEDY, max_tokens, (256,), Speculation("off"))).tokens


@pytest.mark.parametrize("speculation", [TOGETHER, PLANNED, ALONE_PLANNED, Speculation()])
@pytest.mark.parametrize("errors", ["own", "shared"])
async def test_fused_text_is_the_targets_with_accepted_and_rejected_drafts(
    errors: Literal["own", "shared"], speculation: Speculation
) -> None:
    async with running(drafters(errors, target_ms=2.0), SETTINGS) as cluster:
        for prompt in PROMPTS:
            output = await cluster.generate(prompt, GREEDY, 60, (256,), speculation)
            assert output.tokens == await alone(cluster, prompt, 60)
            assert output.metrics is not None
            assert 0 < output.metrics.accepted_draft_tokens < output.metrics.draft_tokens


def simulated(speculation: Speculation, **settings: int) -> list[Output]:
    """The same drafters of 3 ms and a target of 40 ms, in times that no machine disturbs."""
    specs = [EmulateSpec(3.0, agreement, errors="own", confidence_spread=0.2) for agreement in (0.8, 0.7, 0.5)]
    models = [ModelProfile(name, spec, 1) for name, spec in zip("abc", specs, strict=True)]
    target = ModelProfile("t", EmulateSpec(40.0, 1.0, errors="own"), 2)

    async def work() -> list[Output]:
        cluster = SimulatedCluster(make_profile((*models, target), **settings))
        found = await streams(cluster, 1, 8, lambda n: Request(PROMPTS[n % 4] + b"%d" % n, 200, speculation))
        await cluster.close()
        return found

    return run(work())


def mean_length(found: Sequence[Output]) -> float:
    return sum(result.mean_length for result in found) / len(found)


def test_a_tree_accepts_what_the_draft_alone_does_not() -> None:
    without, with_trees = (simulated(PLANNED, tree_nodes=nodes, draft_ahead=0) for nodes in (0, 32))
    assert [r.tokens for r in with_trees] == [r.tokens for r in without]
    assert mean_length(with_trees) > mean_length(without) + 0.2


def test_fusion_is_right_more_often_than_its_best_drafter() -> None:
    best = simulated(Speculation("fixed", ("a", "t"), (5,)))
    assert mean_length(simulated(TOGETHER)) > mean_length(best) + 0.3


def test_drafting_ahead_takes_less_time() -> None:
    waiting, ahead = (simulated(PLANNED, tree_nodes=0, draft_ahead=on) for on in (0, 1))
    assert [r.tokens for r in ahead] == [r.tokens for r in waiting]
    assert sum(r.ms_per_token for r in ahead) < 0.95 * sum(r.ms_per_token for r in waiting)


@pytest.mark.parametrize("eos_after", [0, 1, 9, 33])
async def test_nothing_follows_the_end_of_text(eos_after: int) -> None:
    async with running(drafters(target_ms=2.0, eos_after=eos_after), SETTINGS) as cluster:
        for speculation in (TOGETHER, PLANNED):
            output = await cluster.generate(PROMPTS[0], GREEDY, 60, (256,), speculation)
            assert output.tokens[-1] == 256
            assert len(output.tokens) == eos_after + 1


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
async def test_length_limit_is_exact(max_tokens: int) -> None:
    async with running(drafters(target_ms=2.0), SETTINGS) as cluster:
        for speculation in (TOGETHER, PLANNED):
            output = await cluster.generate(PROMPTS[1], GREEDY, max_tokens, (256,), speculation)
            assert output.tokens == await alone(cluster, PROMPTS[1], max_tokens)


async def test_many_at_once_keep_their_texts() -> None:
    async with running(drafters(target_ms=1.0), SETTINGS) as cluster:
        wanted = [await alone(cluster, p, 50) for p in PROMPTS]
        for speculation in (TOGETHER, Speculation()):
            many = [cluster.generate(p, GREEDY, 50, (256,), speculation) for p in PROMPTS * 3]
            assert [o.tokens for o in await asyncio.gather(*many)] == wanted * 3


async def test_a_drafter_lost_from_a_group_leaves_the_others_drafting() -> None:
    async with running(drafters(), SETTINGS) as cluster:
        wanted = await alone(cluster, PROMPTS[0], 80)
        stream = cluster.stream(PROMPTS[0], GREEDY, 80, (256,), TOGETHER)
        parts = [await anext(stream)]
        cluster.lose_replica("b")
        parts += [part async for part in stream]
        assert [token for part in parts for token in part.tokens] == wanted
        metrics = parts[-1].metrics
        assert metrics is not None
        assert metrics.accepted_draft_tokens > 20


async def test_a_slow_drafter_stalls_a_draft_for_one_turns_deadline_and_no_longer() -> None:
    """One of three takes 0.4 s per step: waited for at each of 8 tokens it would cost 3 s a round."""
    backends = drafters()
    slow = backends["c"]
    assert isinstance(slow, EmulatedBackend)
    async with running(backends, SETTINGS) as cluster:
        wanted = await alone(cluster, PROMPTS[0], 60)
        await cluster.generate(PROMPTS[1], GREEDY, 60, (256,), TOGETHER)  # what a turn takes is known
        slow.update(EmulateSpec(400.0, 0.5, errors="own", confidence_spread=0.2))
        started_s = time.monotonic()
        output = await cluster.generate(PROMPTS[0], GREEDY, 60, (256,), TOGETHER)
        took_s = time.monotonic() - started_s
    assert output.tokens == wanted
    assert output.metrics is not None
    assert took_s < 0.4 * output.metrics.rounds / 2, f"{took_s:.2f} s in {output.metrics.rounds} rounds"


async def test_requests_go_to_the_drafters_of_their_subject() -> None:
    rng, subjects = random.Random(5), ("code: ", "math: ", "text: ")
    specs = {
        name: EmulateSpec(0.3, {s: 0.9 if s == own else 0.2 for s in subjects} | {"default": 0.2}, errors="own")
        for name, own in zip("abc", subjects, strict=True)
    }
    backends: dict[str, Backend] = {n: EmulatedBackend(n, i, spec, 512) for i, (n, spec) in enumerate(specs.items())}
    backends["t"] = EmulatedBackend("t", 3, EmulateSpec(4.0, 1.0, errors="own"), 512)
    chosen: Counter[tuple[str, str]] = Counter()
    async with running(backends, replace(SETTINGS, cooperate=1, draft_ahead=False)) as cluster:
        for number in range(60):
            subject = rng.choice(subjects)
            output = await cluster.generate(f"{subject}{number} and some words".encode(), GREEDY, 32, (256,))
            assert output.metrics is not None
            if number >= 30:
                chosen[subject, output.metrics.chain[0]] += 1
    right = sum(chosen[s, name] for name, s in zip("abc", subjects, strict=True))
    assert right >= 0.9 * sum(chosen.values()), chosen


def test_of_many_drafters_those_hold_a_request_that_suit_it_and_share_the_load() -> None:
    """20 drafters, of which 5 suit each of four subjects; 8 hold a request, of which 2 draft for it."""
    subjects = ("code: ", "math: ", "text: ", "law: ")
    specs = [EmulateSpec(3.0, {own: 0.9, "default": 0.3}, errors="own", per_sequence_ms=0.5) for own in subjects * 5]
    models = [ModelProfile(f"d{i}", spec, 1) for i, spec in enumerate(specs)]
    target = ModelProfile("t", EmulateSpec(30.0, 1.0, errors="own"), 2)
    held: list[tuple[int, frozenset[str]]] = []

    def ask(number: int) -> Request:
        words = " ".join(random.Random(number).choices(["one", "two", "three", "four", "five", "six"], k=5))
        return Request(f"{subjects[number % 4]}{words}".encode(), 32)

    async def work() -> list[Output]:
        cluster = SimulatedCluster(make_profile((*models, target), cooperate=2))
        planning = cluster.router.planning
        await streams(cluster, 8, 15, ask)
        results = await streams(cluster, 8, 5, lambda number: ask(number + 120))
        for number in range(4):
            own = OwnRates(words=words_of(ask(number).prompt))
            held.append((number, frozenset(planning.held(Speculation(), own)) - {"t"}))
        assert planning.held(Speculation("off"), OwnRates()) == ("t",)
        assert planning.held(Speculation("fixed", ("d3|d5+d7", "t")), OwnRates()) == ("d3", "d5", "d7", "t")
        assert not planning.replicas.open
        assert not planning.replicas.held
        await cluster.close()
        return results

    results = run(work())
    assert [len(names) for _, names in held] == [8] * 4
    num_suiting = [sum(int(name[1:]) % 4 == number for name in names) for number, names in held]
    assert sum(num_suiting) >= 14, num_suiting  # of 20; by chance 8
    assert fmean(result.mean_length for result in results) > 4.0  # of two that do not suit: 2


def two_and_a_target(**router: Any) -> SimulatedCluster:
    models = [ModelProfile(name, EmulateSpec(3.0, 0.95, errors="own", confidence_spread=0.02), 1) for name in "ab"]
    target = ModelProfile("t", EmulateSpec(40.0, 1.0, errors="own"), 2)
    return SimulatedCluster(make_profile((*models, target), **router))


def test_a_member_that_lost_its_copy_is_not_waited_for_in_a_busy_loop() -> None:
    """Of two drafters one answers at once that it has nothing, the other takes long: on a clock that stands while
    anything is ready, a loop that does not wait would never end.
    """

    async def work() -> tuple[list[int], list[int]]:
        cluster, together = two_and_a_target(draft_ahead=False), Speculation("fixed", ("a|b", "t"), (5,))
        wanted = await cluster.generate(b"hello", GREEDY, 60, (256,), Speculation("off"))
        running = asyncio.create_task(cluster.generate(b"hello", GREEDY, 60, (256,), together))
        await asyncio.sleep(0.3)
        slow = cluster._replicas["b"]
        slow.spec = replace(slow.spec, base_ms=400.0)
        lost = cluster.engines["a"]
        for held in lost.held():
            lost._forget(held.seq)
        output = await running
        await cluster.close()
        return output.tokens, wanted.tokens

    got, wanted = run(work())
    assert got == wanted


def test_what_was_drafted_ahead_is_not_used_after_a_round_without_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan changes between them and the target alone, live."""
    used: list[tuple[int, int]] = []
    take_over = Drafters._taken_over

    async def watched(self: Drafters, element: str, context: Sequence[int], count: int) -> Any:
        block = await take_over(self, element, context, count)
        if block is not None:
            used.append((block.first, len(self._steps.sequence.tokens) + len(context)))
        return block

    async def work() -> tuple[list[int], list[int]]:
        cluster = two_and_a_target()
        adaptive = cluster.router._settings
        wanted = await cluster.generate(b"hello", GREEDY, 300, (256,), Speculation("off"))
        running = asyncio.create_task(cluster.generate(b"hello", GREEDY, 300, (256,)))
        for turn in range(20):
            await asyncio.sleep(0.11)
            cluster.router.change(replace(adaptive, policy="fixed", chain=("t",)) if turn % 2 else adaptive)
        cluster.router.change(adaptive)
        output = await running
        await cluster.close()
        return output.tokens, wanted.tokens

    monkeypatch.setattr(Drafters, "_taken_over", watched)
    got, wanted = run(work())
    assert got == wanted
    assert len(used) > 5
    assert all(drafted == needed for drafted, needed in used)
