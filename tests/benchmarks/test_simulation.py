"""The simulator: time passes as it should, twice the same, and texts and times are what they are without it."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.joined import Output
from benchmarks.oracle import Level, ms_per_token
from benchmarks.simulation.clock import Deadlock, run
from benchmarks.simulation.cluster import SimulatedCluster
from benchmarks.simulation.links import Link, LinkSpec
from benchmarks.simulation.merged import MergedRounds, merged
from benchmarks.simulation.profile import ModelProfile, Profile, make_profile, read_profile
from benchmarks.simulation.traffic import Request, arrivals, streams
from kvstate.protocol import Finish, Message, Speculation
from models.emulated import EmulateSpec
from router.driver import RoundDriver
from router.trees import TokenTree

HOP_MS = 0.8
OFF = Speculation("off")


def profile(agreements: Sequence[float], bases: Sequence[float], row_ms: float = 0.0) -> Profile:
    link = LinkSpec(HOP_MS / 2.0)
    models = [
        ModelProfile(f"m{i}", EmulateSpec(base, agreement, per_token_ms=row_ms), i + 1, link=link)
        for i, (agreement, base) in enumerate(zip(agreements, bases, strict=True))
    ]
    return make_profile(tuple(models))


def request(number: int, speculation: Speculation, tokens: int = 200) -> Request:
    return Request(f"text {number}".encode(), tokens, speculation)


async def results(of: Profile, speculation: Speculation, count: int) -> list[Output]:
    cluster = SimulatedCluster(of)
    found = await streams(cluster, 1, count, lambda n: request(n, speculation))
    await cluster.close()
    return found


def test_time_passes_only_where_it_is_waited_for() -> None:
    async def work() -> list[float]:
        loop = asyncio.get_running_loop()
        at = [loop.time()]
        await asyncio.sleep(3600.0)
        at.append(loop.time())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60.0):
                await asyncio.Event().wait()
        return [*at, loop.time()]

    began_s = time.monotonic()
    assert run(work()) == [0.0, 3600.0, 3660.0]
    assert time.monotonic() - began_s < 10.0


def test_who_waits_for_ever_is_told() -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(work())


def test_a_link_delivers_in_order_after_latency_and_bytes() -> None:
    async def work() -> list[tuple[float, int]]:
        link, arrived = Link(LinkSpec(latency_ms=10.0, mbit_s=0.1)), list[tuple[float, int]]()

        def deliver(message: Message) -> None:
            assert isinstance(message, Finish)
            arrived.append((asyncio.get_running_loop().time(), message.seq))

        for seq in range(2):
            link.send(Finish(seq), deliver)
        await asyncio.sleep(1.0)
        return arrived

    (first_s, first), (second_s, second) = run(work())
    assert (first, second) == (0, 1)
    frame_s = first_s - 0.010
    assert 0.005 < frame_s < 0.007  # 64 bytes and a few of the message, at 12.5 bytes per ms
    assert second_s - first_s == pytest.approx(frame_s)


def test_messages_sent_at_once_arrive_in_order() -> None:
    async def work() -> list[Message]:
        link, arrived = Link(LinkSpec(latency_ms=10.0)), list[Message]()
        for seq in range(64):
            link.send(Finish(seq), arrived.append)
        await asyncio.sleep(1.0)
        return arrived

    assert run(work()) == [Finish(seq) for seq in range(64)]


@pytest.mark.parametrize(
    ("agreements", "bases", "windows"),
    [((0.7, 1.0), (2.0, 30.0), (4,)), ((0.5, 0.8, 1.0), (1.0, 6.0, 40.0), (2, 5)), ((1.0,), (20.0,), ())],
)
def test_fixed_chains_take_the_time_that_the_oracle_says(
    agreements: Sequence[float], bases: Sequence[float], windows: tuple[int, ...]
) -> None:
    of = profile(agreements, bases, 0.1)
    chain = tuple(m.name for m in of.models)
    speculation = Speculation("fixed", chain, windows) if windows else OFF
    found = run(results(of, speculation, 40))
    levels = [Level(base, agreement, 0.1, 0.0, HOP_MS) for base, agreement in zip(bases, agreements, strict=True)]
    wanted = ms_per_token(levels, windows, num_tokens=20_000)
    assert sum(r.ms_per_token for r in found) / len(found) == pytest.approx(wanted, rel=0.03)


def test_two_runs_are_the_same_and_the_text_is_the_targets() -> None:
    of = profile((0.6, 0.8, 1.0), (1.0, 5.0, 30.0))

    async def work() -> list[Output]:
        cluster = SimulatedCluster(of)
        found = await streams(cluster, 4, 3, lambda n: request(n, Speculation(), 64))
        found += await streams(cluster, 4, 3, lambda n: request(n, OFF, 64))
        await cluster.close()
        return found

    first, second = run(work()), run(work())
    assert [r.arrived_s for r in first] == [r.arrived_s for r in second]
    assert [r.tokens for r in first[:12]] == [r.tokens for r in first[12:]]


def test_arrivals_come_at_their_rates() -> None:
    async def work() -> list[Output]:
        cluster = SimulatedCluster(profile((1.0,), (5.0,)))
        found = await arrivals(cluster, [(20.0, 10.0), (2.0, 10.0)], lambda n: request(n, OFF, 4), seed=3)
        await cluster.close()
        return found

    asked_s = [r.asked_s for r in run(work())]
    assert sum(s < 10.0 for s in asked_s) == pytest.approx(200, abs=45)
    assert sum(s >= 10.0 for s in asked_s) == pytest.approx(20, abs=14)


def test_profiles_that_are_shipped_can_be_read() -> None:
    for path in Path("benchmarks/simulation/profiles").glob("*.yaml"):
        found = read_profile(path)
        assert found.models[-1].spec.agreement == 1.0
        assert found.settings.target == found.models[-1].name


def test_drafts_merge_where_they_begin_alike() -> None:
    assert merged([(1, 2, 3), (1, 2, 4), (5,), (1, 2)]) == TokenTree((1, 2, 3, 4, 5), (-1, 0, 1, 1, -1))


def test_a_tree_of_all_drafts_is_accepted_as_far_as_the_best_of_them_and_text_is_the_targets() -> None:
    """Rates of acceptance a of two drafters that err independently: 1 − (1 − a)(1 − a') is that of the first token."""
    link = LinkSpec(HOP_MS / 2.0)
    rates = {"a": 0.6, "b": 0.5, "target": 1.0}
    models = tuple(
        ModelProfile(name, EmulateSpec(5.0, rate, errors="own"), 1 + (name == "target"), link=link)
        for name, rate in rates.items()
    )

    async def texts(driver: type[RoundDriver], speculation: Speculation) -> list[Output]:
        cluster = SimulatedCluster(make_profile(models), driver)
        found = await streams(cluster, 1, 12, lambda n: request(n, speculation))
        await cluster.close()
        return found

    trees = run(texts(MergedRounds, Speculation("fixed", ("a|b", "target"), (1,))))
    plain = run(texts(RoundDriver, OFF))
    assert [r.tokens for r in trees] == [r.tokens for r in plain]
    assert fmean(r.mean_length for r in trees) == pytest.approx(1.0 + 1.0 - 0.4 * 0.5, abs=0.06)
