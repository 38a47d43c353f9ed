"""Streams of constant concurrency, with a client that answers at once or late."""

import asyncio
from dataclasses import dataclass, field
from typing import cast

import pytest

from benchmarks.client import Answer, StreamError
from benchmarks.emulated_client import AUTO, EmulatedClient, Wish
from benchmarks.routing_classes import KINDS, kind_of, prompt_of
from benchmarks.routing_pairs import divergence_errors, rounds_of_pair
from benchmarks.traffic import Request, numbered, steady


@dataclass
class FakeClient:
    """Answers each request after as many turns of the event loop as `turns` says of its stream; counts who waits."""

    turns: dict[int, int]
    broken: int | None = None
    running: int = 0
    seen: list[int] = field(default_factory=list)

    async def ask(self, prompt: str, tokens: int, speculation: Wish) -> Answer:
        number = int(prompt)
        self.running += 1
        try:
            for _ in range(self.turns[number % len(self.turns)]):
                await asyncio.sleep(0)
            if number == self.broken:
                raise StreamError("broken")
        finally:
            self.seen.append(self.running)
            self.running -= 1
        return Answer(text=prompt)


def _request(number: int) -> Request:
    return Request(str(number), 8, AUTO)


async def test_counted_requests_come_from_all_streams_and_ran_while_all_were_busy() -> None:
    fake = FakeClient({0: 2, 1: 3, 2: 20})
    answers = await steady(cast("EmulatedClient", fake), 3, 2, _request)
    assert [answer.text for answer in answers] == ["0", "1", "2", "3", "4", "5"]
    assert len(fake.seen) > 6  # the fast streams went on
    assert fake.running == 0


async def test_an_error_of_a_stream_is_not_lost() -> None:
    with pytest.raises(StreamError):
        await steady(cast("EmulatedClient", FakeClient({0: 1, 1: 1}, broken=3)), 2, 3, _request)


def test_prompts_differ_by_turn_and_number() -> None:
    prompts = numbered("title", 2)
    assert len({prompt(number) for prompt in prompts for number in range(5)}) == 10


def test_each_stream_meets_all_kinds_and_nine_requests_are_a_turn() -> None:
    for stream in range(3):
        assert {kind_of(number) for number in range(stream, 9, 3)} == set(KINDS)
    assert [kind_of(number) for number in range(9, 18)] == [kind_of(number) for number in range(9)]
    assert all(prompt_of("title", number).startswith(kind_of(number)) for number in range(18))
    assert len({prompt_of("title", number) for number in range(18)}) == 18


def test_what_the_table_says_of_pairs_is_compared_with_the_difference_of_agreements() -> None:
    table = {
        "pairs": [{"lower": "a", "upper": "b", "divergence": 0.25}],
        "candidates": [
            {"chain": ["a", "b", "t"], "rounds": 5},
            {"chain": ["a", "t"], "rounds": 7},
        ],
    }
    assert divergence_errors(table, {"a": 0.6, "b": 0.9}) == {("a", "b"): pytest.approx(-0.05)}
    assert rounds_of_pair(table, ("a", "b")) == 5
    assert rounds_of_pair(table, ("b", "a")) == 0
