"""The choices of one request (`n`): each runs as a request with a seed of its own, and all stream together."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec.structs import replace

from deployments.completions import Piece
from kvstate.protocol import OpenRequest
from models.seeds import mix

Pieces = AsyncGenerator[Piece, None]
ChoicePieces = AsyncGenerator[tuple[int, Piece], None]


def choices_of(message: OpenRequest, count: int) -> list[OpenRequest]:
    """Choice 0 has the request's own seed."""
    seeds = (mix(message.sampling.seed, 0, index) for index in range(count))
    return [replace(message, sampling=replace(message.sampling, seed=seed)) for seed in seeds]


async def merged(parts: Sequence[Pieces]) -> ChoicePieces:
    """(index of the choice, its piece) as they come. The first error ends all; so does leaving early."""
    queue: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(maxsize=len(parts))
    tasks = [asyncio.create_task(_drain(index, part, queue)) for index, part in enumerate(parts)]
    try:
        unfinished = len(parts)
        while unfinished:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(index: int, part: Pieces, queue: "asyncio.Queue[tuple[int, Piece | Exception | None]]") -> None:
    try:
        async with aclosing(part):
            async for piece in part:
                await queue.put((index, piece))
    except Exception as error:  # noqa: BLE001 - raised again by `merged`
        await queue.put((index, error))
    await queue.put((index, None))
