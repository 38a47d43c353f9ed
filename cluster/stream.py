"""One open stream: messages in order, coalesced per event-loop tick, alive as long as heartbeats come.

    send() ─▶ outbox ─▶ one frame per tick ─▶ pipe ─▶ … ─▶ pipe ─▶ decode ─▶ handler.on_messages(messages)

Everything here runs on the event loop that owns the stream; other threads use
`loop.call_soon_threadsafe(stream.send, message)`.
A stream ends once, with one reason, and its handler hears of it once. It never raises into its owner's code: sending on
an ended stream does nothing. This module does not know how streams are opened (`cluster/transport.py`).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from cluster.frames import FrameError, Heartbeat, Hello, Limits, Payload, Refused, Welcome, decode_frame, encode_frames
from kvstate.protocol import AnyMessage

logger = logging.getLogger(__name__)

_TICKS_PER_HEARTBEAT = 2
_CONTROL_TYPES = (Hello, Welcome, Refused)


class Handler(Protocol):
    """What a stream calls. Both methods return at once; they run on the stream's event loop."""

    def on_messages(self, messages: Sequence[AnyMessage]) -> None: ...

    def on_closed(self, reason: str) -> None: ...


class Faults(Protocol):
    """Faults to inject, for tests and emulated networks. Heartbeats pass here too, so a cut link can be played."""

    def delay_s(self, message: Payload) -> float | None:
        """How long to hold an outgoing message (0.0: send now), None to lose it. The order of messages stays."""
        ...


class Pipe(Protocol):
    """The bytes of one gRPC call. `read` returns `grpc.aio.EOF` when the peer will send no more."""

    async def read(self) -> object: ...

    async def write(self, data: bytes) -> None: ...

    async def finish(self) -> bool:
        """Say that nothing more will be written. True where the peer's end of stream follows once it has read all."""
        ...


@dataclass(slots=True)
class TransportStats:
    """Counts over all streams of one process, ended ones included."""

    bad_frames: Counter[str] = field(default_factory=Counter)
    refused_hellos: Counter[str] = field(default_factory=Counter)
    frames_sent: int = 0
    messages_sent: int = 0
    frames_received: int = 0
    messages_received: int = 0
    messages_lost_to_faults: int = 0


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Timing and bounds of streams. A stream breaks when nothing came for `silent_heartbeats` × `heartbeat_s`."""

    heartbeat_s: float = 1.0
    silent_heartbeats: float = 2.5
    connect_s: float = 5.0
    close_s: float = 1.0
    max_outbox_messages: int = 65_536
    limits: Limits = field(default_factory=Limits)


class Stream:
    """`peer` is who the other side said it is. `closed` resolves to the reason when the stream has ended."""

    def __init__(
        self,
        pipe: Pipe,
        generation: int,
        peer: Hello,
        options: StreamOptions,
        stats: TransportStats,
        faults: Faults | None,
    ) -> None:
        self.peer = peer
        self.frames_sent = 0
        self.messages_sent = 0
        self._pipe = pipe
        self._generation = generation
        self._options = options
        self._stats = stats
        self._faults = faults
        self._loop = asyncio.get_running_loop()
        self._outbox: list[Payload] = []
        self._wake = asyncio.Event()
        self._last_due_s = 0.0
        self._silent_ticks = 0
        self._close_reason: str | None = None
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self.closed: asyncio.Future[str] = self._loop.create_future()

    @property
    def is_open(self) -> bool:
        return self._close_reason is None and not self._ended.done()

    @property
    def was_closed_here(self) -> bool:
        return self._close_reason is not None

    @property
    def close_s(self) -> float:
        return self._options.close_s

    def send(self, message: Payload) -> None:
        """Queue a message; never blocks. More than `max_outbox_messages` waiting breaks the stream."""
        if not self.is_open:
            return
        if self._faults is None:
            self._enqueue(message)
            return
        delay_s = self._faults.delay_s(message)
        if delay_s is None:
            self._stats.messages_lost_to_faults += 1
        elif delay_s == 0.0 and self._last_due_s <= self._loop.time():
            self._enqueue(message)
        else:
            self._last_due_s = max(self._loop.time() + delay_s, self._last_due_s + 1e-6)
            self._loop.call_at(self._last_due_s, self._enqueue, message)

    def close(self, reason: str = "closed by this side") -> None:
        """Send what was queued before, then end the stream, after `close_s` at the latest. Idempotent."""
        if self.is_open:
            self._close_reason = reason
            self._wake.set()
            self._loop.call_later(self._options.close_s, self.break_off, reason)

    def break_off(self, reason: str) -> None:
        """End the stream at once; what was queued is lost. Idempotent."""
        if not self._ended.done():
            self._ended.set_result(reason)

    async def run(self, make_handler: "Callable[[Stream], Handler]") -> None:
        """Serve the stream to its end; the owner's opening code calls it once."""
        handler = make_handler(self)
        tasks = [asyncio.create_task(part) for part in (self._read(handler), self._write(), self._beat())]
        try:
            await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            self.break_off("cancelled")
            raise
        finally:
            for task in tasks:
                task.cancel()
            self._outbox.clear()
            reason = self._ended.result()
            try:
                handler.on_closed(reason)
            except Exception:
                logger.exception("stream %s/%s: on_closed failed", self.peer.role, self.peer.id)
            self.closed.set_result(reason)

    def _enqueue(self, message: Payload) -> None:
        if self._ended.done():
            return
        if len(self._outbox) >= self._options.max_outbox_messages:
            self.break_off("outbox full")
            return
        self._outbox.append(message)
        self._wake.set()

    async def _write(self) -> None:
        """One frame with all that was sent since the last one; the task wakes one tick after the first send."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                messages, self._outbox = self._outbox, []
                if messages:
                    await self._write_frames(messages)
                if self._close_reason is not None and not self._outbox:
                    # A cancelled read would cancel the call and lose what is still on its way: wait for the peer's end.
                    if not await self._pipe.finish():
                        self.break_off(self._close_reason)
                    return
        except FrameError as error:
            self._bad_frame(error)
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            self.break_off(f"write failed: {first_line(error)}")

    async def _write_frames(self, messages: list[Payload]) -> None:
        for data in encode_frames(self._generation, messages, self._options.limits):
            await self._pipe.write(data)
            self.frames_sent += 1
            self._stats.frames_sent += 1
        self.messages_sent += len(messages)
        self._stats.messages_sent += len(messages)

    async def _read(self, handler: Handler) -> None:
        try:
            while (data := await self._pipe.read()) is not grpc.aio.EOF:
                self._silent_ticks = 0
                self._receive(data, handler)
            self.break_off(self._close_reason or "closed by peer")
        except FrameError as error:
            self._bad_frame(error)
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            if _is_too_large(error):
                self._bad_frame(FrameError("oversize", first_line(error)))
            else:
                self.break_off(f"read failed: {first_line(error)}")
        except asyncio.CancelledError:
            # gRPC cancels a pending read when the call ends from the other side.
            self.break_off(self._close_reason or "cancelled by peer")
            raise
        except Exception:
            logger.exception("stream %s/%s: handler failed", self.peer.role, self.peer.id)
            self.break_off("handler failed")

    def _receive(self, data: object, handler: Handler) -> None:
        assert isinstance(data, bytes)
        frame = decode_frame(data, self._options.limits)
        if frame.generation != self.peer.generation:
            raise FrameError("generation", f"{frame.generation}, said {self.peer.generation}")
        messages: list[AnyMessage] = []
        for message in frame.messages:
            if isinstance(message, Heartbeat):
                continue
            if isinstance(message, _CONTROL_TYPES):
                raise FrameError("malformed", f"{type(message).__name__} in an open stream")
            messages.append(message)
        self._stats.frames_received += 1
        self._stats.messages_received += len(messages)
        if messages and not self._ended.done():
            handler.on_messages(messages)

    async def _beat(self) -> None:
        """Counts its own ticks, not the clock: a loop that was blocked for seconds does not call its peers dead."""
        tick_s = self._options.heartbeat_s / _TICKS_PER_HEARTBEAT
        most_silent_ticks = self._options.silent_heartbeats * _TICKS_PER_HEARTBEAT
        num_ticks = 0
        while self._silent_ticks < most_silent_ticks:
            if num_ticks % _TICKS_PER_HEARTBEAT == 0:
                self.send(Heartbeat())
            await asyncio.sleep(tick_s)
            num_ticks += 1
            self._silent_ticks += 1
        self.break_off("heartbeats missed")

    def _bad_frame(self, error: FrameError) -> None:
        if self._ended.done():
            return
        self._stats.bad_frames[error.reason] += 1
        logger.warning("stream %s/%s: bad frame: %s", self.peer.role, self.peer.id, error)
        self.break_off(f"bad frame: {error.reason}")


def first_line(error: Exception) -> str:
    """What to log of a gRPC error, whose text is a page."""
    details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
    return next(iter((details or type(error).__name__).splitlines()), type(error).__name__)


def _is_too_large(error: Exception) -> bool:
    return isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
