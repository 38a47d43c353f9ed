"""Streams that keep the concurrency constant, and what their requests took: time per token at the client.

Each stream asks one request after the other. Those counted all ran while every stream was busy: a stream that is done
goes on asking, uncounted, until the last one is done too, and what then still runs is dropped.
"""

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import psutil

from benchmarks.client import Answer
from benchmarks.emulated_client import EmulatedClient, Wish
from benchmarks.report import standard_error


@dataclass(frozen=True, slots=True)
class Request:
    prompt: str
    tokens: int
    wish: Wish


MakeRequest = Callable[[int], Request]
MakePrompt = Callable[[int], str]
MakeWish = Callable[[int], Wish]
"""Of the nth request of all; equal numbers give equal prompts."""


def always(wish: Wish) -> MakeWish:
    return lambda _: wish


def numbered(title: str, turns: int) -> list[MakePrompt]:
    """Prompts for each of so many turns, no two alike."""
    return [partial(_numbered, f"{title} {turn}") for turn in range(turns)]


def _numbered(title: str, number: int) -> str:
    return f"{title} {number}"


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds per token, one value for each request."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def error(self) -> float:
        return standard_error(self.values)

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.error:.2f} ms"


async def steady(client: EmulatedClient, concurrency: int, per_stream: int, make: MakeRequest) -> list[Answer]:
    """The answers of the first `per_stream` requests of each stream, in the order of their numbers."""
    answers: dict[int, Answer] = {}
    all_done = asyncio.Event()

    async def stream(first: int) -> None:
        for turn in range(10 * per_stream + 10):
            number = first + turn * concurrency
            request = make(number)
            answer = await client.ask(request.prompt, request.tokens, request.wish)
            if turn < per_stream:
                answers[number] = answer
            if len(answers) == concurrency * per_stream:
                all_done.set()

    streams = [asyncio.create_task(stream(i)) for i in range(concurrency)]
    done = asyncio.create_task(all_done.wait())
    await asyncio.wait([done, *streams], return_when=asyncio.FIRST_COMPLETED)
    failed = [task for task in streams if task.done()]
    for task in [done, *streams]:
        task.cancel()
    await asyncio.gather(done, *streams, return_exceptions=True)
    for task in failed:
        task.result()
    assert len(answers) == concurrency * per_stream, "all streams ended, none of them by an error"
    return [answers[number] for number in sorted(answers)]


async def in_turn(
    client: EmulatedClient,
    concurrency: int,
    wishes: Mapping[str, MakeWish],
    prompts: Sequence[MakePrompt],
    tokens: int,
    per_stream: int,
) -> tuple[dict[str, list[Answer]], float]:
    """All `wishes` (of a request by its number) once per round, the order turning; a round has prompts of its own.

    Also the share of all processors' time that was busy.
    """
    answers: dict[str, list[Answer]] = {name: [] for name in wishes}
    psutil.cpu_percent()
    for turn, prompt in enumerate(prompts):
        names = list(wishes)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            wish = wishes[name]

            def make(number: int, prompt: MakePrompt = prompt, wish: MakeWish = wish) -> Request:
                return Request(prompt(number), tokens, wish(number))

            answers[name] += await steady(client, concurrency, per_stream, make)
    return answers, psutil.cpu_percent() / 100.0


def times_of(answers: Sequence[Answer]) -> Times:
    return Times(tuple(answer.ms_per_token for answer in answers))
