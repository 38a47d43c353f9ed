"""A streamed completion seen from the client: when which text came. Knows only HTTP."""

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import httpx


@dataclass(slots=True)
class Answer:
    """`arrivals`: (time in seconds, characters) of each event that carried text."""

    text: str = ""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def ms_per_token(self) -> float:
        """(last − first)/(n − 1) for models whose tokens are one character each; a first event of k counts k."""
        return self.ms_per_token_from(1, len(self.text))

    def ms_per_token_from(self, first: int, last: int) -> float:
        """The same from the event that brought token `first`, counted from 1, to the one that brought `last`."""
        came = list(zip(accumulate(count for _, count in self.arrivals), self.arrivals, strict=True))
        num_first, (first_s, _) = next(item for item in came if item[0] >= first)
        num_last, (last_s, _) = next(item for item in came if item[0] >= last)
        return (last_s - first_s) * 1e3 / (num_last - num_first)


class StreamError(Exception):
    """The server answered with an error, before or in the stream."""


async def stream_completion(client: httpx.AsyncClient, body: Mapping[str, Any]) -> AsyncIterator[Answer]:
    """Yields the growing answer at each event with text, and once at the end. Raises StreamError."""
    answer = Answer()
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        if response.status_code != httpx.codes.OK:
            raise StreamError(f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:300]}")
        async for line in response.aiter_lines():
            now_s = time.perf_counter()
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            if _take(answer, json.loads(data), now_s):
                yield answer
    yield answer


def _take(answer: Answer, event: Mapping[str, Any], now_s: float) -> bool:
    """Whether the event brought text."""
    if "error" in event:
        raise StreamError(str(event["error"]))
    answer.metrics = (event.get("metrics") or {}).get("speculative_decoding") or answer.metrics
    text = "".join(choice.get("text") or "" for choice in event.get("choices", []))
    if not text:
        return False
    answer.text += text
    answer.arrivals.append((now_s, len(text)))
    return True


async def complete(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Answer:
    answer = Answer()
    async for answer in stream_completion(client, body):  # noqa: B007 - the last one is whole
        pass
    return answer
