"""`batch`: prompts of a file through a running app, a bounded number at a time, results in the order of the input.

Knows only HTTP: whether the app was found running or started for the batch is `serve.py`'s matter.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx

from specrelay.batch_rows import Row, written_whole
from specrelay.endpoint import CONNECT_TIMEOUT_S, Endpoint, error_of

BUSY = (429, 503)
DEFAULT_RETRY_AFTER_S = 1.0
Result = dict[str, Any]
Send = Callable[[Row], Awaitable[Result]]


@dataclass(frozen=True, slots=True)
class Limits:
    """How many requests are under way at once, and how long one may take, waits and repetitions counted."""

    concurrency: int = 8
    deadline_s: float = 300.0


async def run_batch(endpoint: Endpoint, rows: list[Row], output: Path, limits: Limits, done: Callable[[], None]) -> int:
    """Send every row, write `output` whole; returns the number of rows that ended in an error.

    `done` is called once per finished row.
    """
    timeout = httpx.Timeout(limits.deadline_s, connect=CONNECT_TIMEOUT_S)
    pool = httpx.Limits(max_connections=limits.concurrency)

    async def send(row: Row) -> Result:
        result = await _answered(client, row, limits.deadline_s)
        done()
        return result

    with written_whole(output) as file:
        async with httpx.AsyncClient(
            base_url=endpoint.url, headers=endpoint.headers, timeout=timeout, limits=pool
        ) as client:
            return await write_in_order(rows, send, file, limits.concurrency)


async def write_in_order(rows: Iterable[Row], send: Send, file: TextIO, concurrency: int) -> int:
    """`concurrency` workers take rows in turn; a line is written once all before it are. Returns the error count."""
    queue, waiting, next_index, errors = iter(rows), dict[int, Result](), 0, 0

    async def work() -> None:
        nonlocal next_index, errors
        for row in queue:
            waiting[row.index] = result = await send(row)
            errors += "error" in result
            while next_index in waiting:
                file.write(json.dumps(waiting.pop(next_index), ensure_ascii=False) + "\n")
                next_index += 1

    async with asyncio.TaskGroup() as workers:
        for _ in range(concurrency):
            workers.create_task(work())
    assert not waiting, "rows must count from 0 without gaps"
    return errors


async def _answered(client: httpx.AsyncClient, row: Row, deadline_s: float) -> Result:
    head: Result = {"id": row.id, "index": row.index}
    try:
        async with asyncio.timeout(deadline_s):
            response = await _post_until_taken(client, row)
    except TimeoutError:
        message = f"no answer within {deadline_s:g} s"
        return head | {"error": {"message": message, "type": "timeout_error", "param": None, "code": 408}}
    except httpx.HTTPError as error:
        message = f"{type(error).__name__}: {error}"
        return head | {"error": {"message": message, "type": "connection_error", "param": None, "code": None}}
    if response.status_code != httpx.codes.OK:
        return head | {"error": error_of(response)}
    return head | {"response": response.json()}


async def _post_until_taken(client: httpx.AsyncClient, row: Row) -> httpx.Response:
    """Post; while the app is busy, wait as long as it asks for and post again. The caller bounds the time."""
    while True:
        response = await client.post(row.path, json=row.body)
        if response.status_code not in BUSY:
            return response
        await asyncio.sleep(_retry_after_s(response))


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return max(0.05, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):
        return DEFAULT_RETRY_AFTER_S
