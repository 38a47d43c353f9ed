"""An ingress's stream to the router: opens requests, hands out their tokens, re-opens them when the stream broke."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import msgspec

from cluster.dialer import Dialer
from cluster.stream import Stream
from deployments.openai_api import ApiError
from deployments.streams import Callbacks
from kvstate.protocol import AnyMessage, CancelRequest, CutRequest, Delivered, Failed, FinishReason, OpenRequest

GRACE_S = 1.0
"""How much longer than the router the ingress waits, so that the router's own answer comes first."""


@dataclass(slots=True)
class Running:
    """A request as `asked` and as sent last, and all output tokens received; `inbox` is bounded by their number."""

    asked: OpenRequest
    message: OpenRequest
    deadline_s: float
    output: list[int] = field(default_factory=list)
    cut_len: int | None = None
    inbox: asyncio.Queue[Delivered | Failed] = field(default_factory=asyncio.Queue)


class RouterLink:
    """All requests of one ingress."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: dict[str, Running] = {}
        self._ids = itertools.count()
        self._dialer: Dialer | None = None
        self._stream: Stream | None = None

    def attach(self, dialer: Dialer) -> None:
        self._dialer = dialer
        dialer.start()

    def callbacks(self, stream: Stream) -> Callbacks:
        """A new stream: whatever was running goes on from the tokens received, under a new id."""
        self._stream = stream
        self._reopen_all()
        return Callbacks(self._receive, lambda: None)

    async def generate(self, message: OpenRequest) -> AsyncGenerator[Delivered, None]:
        """Parts as they are committed, each token once. Raises ApiError. Leaving early cancels the request."""
        running = Running(message, message, time.monotonic() + message.deadline_s)
        self._start(running)
        finished = False
        try:
            while not finished:
                part = await self._next(running)
                finished = part.finish_reason is not None
                yield part
        finally:
            self._running.pop(running.message.request_id, None)
            if not finished:
                self._send(CancelRequest(running.message.request_id))

    def cut(self, message: OpenRequest, output_len: int) -> None:
        """A stop string ended the output; one more part follows, with the counts."""
        for running in self._running.values():
            if running.asked is message:
                running.cut_len = output_len
                self._send(CutRequest(running.message.request_id, output_len))

    async def _next(self, running: Running) -> Delivered:
        left_s = running.deadline_s - time.monotonic() + GRACE_S
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                part = await running.inbox.get()
        except TimeoutError:
            raise ApiError(503, "the router did not answer before the deadline", retry_after_s=1.0) from None
        if isinstance(part, Failed):
            raise ApiError(part.code, part.message, part.param, part.retry_after_s)
        return part

    def _start(self, running: Running) -> None:
        request_id = f"{self._name}-{next(self._ids)}"
        left_s = running.deadline_s - time.monotonic()
        running.message = msgspec.structs.replace(
            running.message, request_id=request_id, delivered=tuple(running.output), deadline_s=max(0.0, left_s)
        )
        self._running[request_id] = running
        self._send(running.message)

    def _reopen_all(self) -> None:
        waiting, self._running = list(self._running.values()), {}
        for running in waiting:
            if running.cut_len is None:
                self._start(running)
            else:  # it ended at its stop string; only its counts are lost
                end = Delivered(running.message.request_id, running.cut_len, (), FinishReason.STOP)
                running.inbox.put_nowait(end)

    def _receive(self, message: AnyMessage) -> None:
        if not isinstance(message, Delivered | Failed):
            return
        running = self._running.get(message.request_id)
        if running is None:
            return
        if isinstance(message, Delivered):
            running.output.extend(message.tokens)
        if isinstance(message, Failed) or message.finish_reason is not None:
            del self._running[message.request_id]  # a broken stream must not open it again
        running.inbox.put_nowait(message)

    def _send(self, message: OpenRequest | CutRequest | CancelRequest) -> None:
        """Without a stream nothing is sent: `_reopen_all` opens what still runs when there is one."""
        if self._stream is not None and self._stream.is_open:
            self._stream.send(message)
