"""Part `straggler`: of three drafters that draft together one becomes slow, another dies, within an answer."""

import os
import signal
from collections.abc import Awaitable, Callable
from itertools import pairwise

from benchmarks.client import Answer, stream_completion
from benchmarks.emulated_app import emulated_app, emulated_config
from benchmarks.emulated_client import AUTO, OFF, EmulatedClient, Wish, emulated_client, fixed
from benchmarks.experts import LEVELS, TARGET, emulate, experts_in, prompt_of, subject_of
from benchmarks.report import Report

TOKENS = 192
WINDOW = 8
SLOW_MS = 300.0
AFTER_TOKENS = 64
MOST_STALL_MS = 40.0
"""A turn's deadline is twice what a turn takes and 2 ms, about 10 ms; the rest is for the machine's noise."""


async def straggler(report: Report) -> None:
    with emulated_app(emulated_config("cooperation-straggler", emulate(), levels=LEVELS)) as app:
        async with emulated_client(app) as client:
            first, second = experts_in(subject_of(1))
            third = next(name for name in experts_in("tale" if subject_of(1) != "tale" else "law"))
            group = fixed([[first, second, third], TARGET], [WINDOW])
            prompt = prompt_of("straggler", 1)
            wanted = (await client.ask(prompt, TOKENS, OFF)).text
            for _ in range(4):
                await client.ask(prompt_of("warm-up", 1), TOKENS, group)
            usual = _longest_gap_ms(await client.ask(prompt, TOKENS, group))
            report.add("straggler: longest gap between events, usually", f"{usual:.0f} ms")
            slowed = await _disturbed(client, prompt, group, lambda: app.change_now(third, {"base_ms": SLOW_MS}))
            _judge(report, "slow", slowed, wanted, usual)
            await app.change_now(third, {"base_ms": 3.0})
            pid = await app.call(second, "pid")

            async def kill() -> None:
                os.kill(pid, signal.SIGKILL)

            killed = await _disturbed(client, prompt, group, kill)
            _judge(report, "killed", killed, wanted, usual)
            await client.ask(prompt, 8, AUTO)


async def _disturbed(
    client: EmulatedClient, prompt: str, wish: Wish, disturb: Callable[[], Awaitable[object]]
) -> Answer:
    answer, is_disturbed = Answer(), False
    async for answer in stream_completion(client.http, client.body(prompt, TOKENS, wish)):
        if len(answer.text) >= AFTER_TOKENS and not is_disturbed:
            is_disturbed = True
            await disturb()
    return answer


def _longest_gap_ms(answer: Answer) -> float:
    at_s = [arrived_s for arrived_s, _ in answer.arrivals]
    return max((b - a) * 1e3 for a, b in pairwise(at_s))


def _judge(report: Report, title: str, answer: Answer, wanted: str, usual_ms: float) -> None:
    longest = _longest_gap_ms(answer)
    report.add(f"straggler {title}: same text", str(answer.text == wanted), "True", answer.text == wanted)
    limit = usual_ms + MOST_STALL_MS
    title = f"straggler {title}: longest gap between events"
    report.add(title, f"{longest:.0f} ms", f"≤ {limit:.0f} ms", longest <= limit)
