"""Keeping a stream to a peer that may move or restart."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cluster.stream import Stream
from cluster.transport import Endpoint, MakeHandler, RefusedError, dial

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between tries to connect: `first_s`, doubled up to `most_s`."""

    first_s: float = 0.05
    most_s: float = 1.0


class Dialer:
    """Keeps one stream to a peer that may move or restart.

    `resolve` finds the address anew for each try (a control-plane call, at most `resolve_s`); whatever it raises is
    logged and tried again. `on_refused` hears of every refusal: a router that is refused for its generation is outdated
    and should stop. `stream` is the open stream, or None.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        resolve: Callable[[], Awaitable[str]],
        make_handler: MakeHandler,
        backoff: Backoff = Backoff(),
        on_refused: Callable[[RefusedError], None] | None = None,
    ) -> None:
        self.stream: Stream | None = None
        self._endpoint = endpoint
        self._resolve = resolve
        self._make_handler = make_handler
        self._backoff = backoff
        self._on_refused = on_refused
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._keep_connected())

    async def stop(self, reason: str = "closed by this side") -> None:
        """Close the stream, sending what it has queued, and try no more. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self.stream is not None:
            self.stream.close(reason)
            await asyncio.shield(self.stream.closed)
            self.stream = None

    async def _keep_connected(self) -> None:
        pause_s = self._backoff.first_s
        while True:
            opened_s = asyncio.get_running_loop().time()
            await self._connect_once()
            if asyncio.get_running_loop().time() - opened_s > self._backoff.most_s:
                pause_s = self._backoff.first_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._backoff.most_s)

    async def _connect_once(self) -> None:
        """One stream from opening to its end, or one failed try."""
        try:
            async with asyncio.timeout(self._endpoint.options.connect_s):
                address = await self._resolve()
            self.stream = await dial(self._endpoint, address, self._make_handler)
        except RefusedError as error:
            logger.warning("%s", error)
            if self._on_refused is not None:
                self._on_refused(error)
        except Exception as error:  # noqa: BLE001 - whatever `resolve` raises: the peer may be back at the next try
            logger.info("connecting failed, trying again: %s", error)
        if self.stream is not None:
            await asyncio.shield(self.stream.closed)
            self.stream = None
