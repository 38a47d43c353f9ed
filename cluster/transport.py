"""Opening streams: gRPC aio, one bidirectional call per pair of processes, bytes in and out without protobuf.

Who dials sends `Hello`; who serves answers `Welcome`, or `Refused` and ends the call. From then on both sides are equal
(`cluster/stream.py`). A process makes one `Endpoint` and passes it to everything it serves and dials:

    endpoint = Endpoint("replica", "m8b-0")
    server = await serve(endpoint, "127.0.0.1", 0, make_handler)        # make_handler(stream) -> Handler
    stream = await dial(endpoint, "127.0.0.1:7001", make_handler)       # once, raises DialError or RefusedError

`cluster/dialer.py` dials again and again.

Generations: of the roles in `RANKED_ROLES` there is one process at a time and each restart has a higher number. A lower
one than was ever seen is refused in both directions, and the streams of the older ones are ended.

Errors: TransportError ── DialError (not reached, or not in time), RefusedError (reached, refused).
"""

import asyncio
import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import grpc.aio

from cluster.frames import FrameError, Hello, Payload, Refused, Welcome, decode_frame, encode_frames
from cluster.stream import Faults, Handler, Stream, StreamOptions, TransportStats, first_line

logger = logging.getLogger(__name__)

RANKED_ROLES = frozenset({"router", "coordinator"})
MakeHandler = Callable[[Stream], Handler]

_SERVICE = "specrelay.Transport"
_METHOD = "Connect"
_GRPC_LIMIT_FACTOR = 4


class TransportError(Exception):
    """Base of what opening a stream raises."""


class DialError(TransportError):
    """Nobody was reached at `address`."""

    def __init__(self, address: str, cause: str) -> None:
        super().__init__(address, cause)
        self.address = address
        self.cause = cause

    def __str__(self) -> str:
        return f"cannot reach {self.address}: {self.cause}"


class RefusedError(TransportError):
    """`reason` is that of `Refused`; `stale_peer` when it is this side that refuses an outdated peer."""

    def __init__(self, address: str, reason: str, highest_generation: int, stale_peer: bool = False) -> None:
        super().__init__(address, reason, highest_generation, stale_peer)
        self.address = address
        self.reason = reason
        self.highest_generation = highest_generation
        self.stale_peer = stale_peer

    def __str__(self) -> str:
        who = "stale peer" if self.stale_peer else "refused"
        return f"{self.address}: {who}: {self.reason} (highest generation {self.highest_generation})"


class Generations:
    """The highest generation seen of each ranked role."""

    def __init__(self) -> None:
        self._highest: dict[str, int] = {}

    def highest(self, role: str) -> int:
        return self._highest.get(role, 0)

    def admit(self, role: str, generation: int) -> bool:
        """Whether the generation is current; notes a newer one. Roles without rank are always current."""
        if role not in RANKED_ROLES:
            return True
        if generation < self.highest(role):
            return False
        self._highest[role] = generation
        return True


@dataclass(frozen=True, slots=True)
class Endpoint:
    """This process as others see it, and what all its streams share. `token`: a secret that every hello must carry."""

    role: str
    id: str
    generation: int = 0
    token: str | None = field(default=None, repr=False)
    options: StreamOptions = field(default_factory=StreamOptions)
    faults: Faults | None = None
    stats: TransportStats = field(default_factory=TransportStats)
    generations: Generations = field(default_factory=Generations)

    def open_stream(self, pipe: "_Pipe", peer: Hello) -> Stream:
        return Stream(pipe, self.generation, peer, self.options, self.stats, self.faults)


class _Call(Protocol):
    """What the calls of both sides agree on."""

    async def read(self) -> object: ...

    async def write(self, message: bytes) -> None: ...


class _ServerCall(_Call, Protocol):
    def peer(self) -> str: ...


class _Pipe:
    """A gRPC call of either side."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self.read = call.read
        self.write = call.write

    async def finish(self) -> bool:
        """The serving side ends its direction by returning from the call."""
        if not isinstance(self._call, grpc.aio.StreamStreamCall):
            return False
        await self._call.done_writing()
        return True

    async def exchange_one(self, endpoint: Endpoint, message: Hello | Welcome | Refused) -> None:
        for data in encode_frames(endpoint.generation, [message], endpoint.options.limits):
            await self.write(data)

    async def read_one(self, endpoint: Endpoint) -> Payload:
        """The only message of the next frame. Raises FrameError."""
        data = await self.read()
        if data is grpc.aio.EOF:
            raise FrameError("malformed", "stream ended before the greeting")
        assert isinstance(data, bytes)
        messages = decode_frame(data, endpoint.options.limits).messages
        if len(messages) != 1:
            raise FrameError("malformed", f"{len(messages)} messages in the greeting")
        return messages[0]


class Server:
    """Accepts streams at `host:port`. `stop` ends them all."""

    def __init__(self, endpoint: Endpoint, make_handler: MakeHandler) -> None:
        self.port = 0
        self.streams: list[Stream] = []
        self._endpoint = endpoint
        self._make_handler = make_handler
        self._closing = False
        self._grpc = grpc.aio.server(options=_grpc_options(endpoint.options))

    async def start(self, host: str, port: int) -> None:
        call = grpc.stream_stream_rpc_method_handler(self._serve_call)
        self._grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: call}),))
        try:
            self.port = self._grpc.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise TransportError(f"cannot listen at {host}:{port}: {error}") from error
        await self._grpc.start()

    async def stop(self, reason: str = "server stopped") -> None:
        """Refuse new streams, let the open ones send what they have queued, end everything."""
        self._closing = True
        for stream in list(self.streams):
            stream.close(reason)
        await asyncio.gather(*(stream.closed for stream in list(self.streams)))
        await self._grpc.stop(grace=self._endpoint.options.close_s)

    async def _serve_call(self, _requests: object, context: _ServerCall) -> None:
        pipe = _Pipe(context)
        try:
            async with asyncio.timeout(self._endpoint.options.connect_s):
                peer = await self._greet(pipe)
        except FrameError as error:
            self._endpoint.stats.bad_frames[error.reason] += 1
            logger.warning("greeting of %s: bad frame: %s", context.peer(), error)
            return
        except TimeoutError:
            self._endpoint.stats.bad_frames["no hello"] += 1
            return
        if peer is not None:
            await self._run(self._endpoint.open_stream(pipe, peer))

    async def _greet(self, pipe: _Pipe) -> Hello | None:
        """The peer if it is welcome; otherwise it is told why not."""
        endpoint = self._endpoint
        hello = await pipe.read_one(endpoint)
        if not isinstance(hello, Hello):
            raise FrameError("malformed", f"{type(hello).__name__} instead of a hello")
        reason = self._refusal(hello)
        if reason is not None:
            endpoint.stats.refused_hellos[reason] += 1
            logger.warning("refused %s/%s generation %s: %s", hello.role, hello.id, hello.generation, reason)
            await pipe.exchange_one(endpoint, Refused(reason, endpoint.generations.highest(hello.role)))
            return None
        await pipe.exchange_one(endpoint, Welcome(endpoint.role, endpoint.id, endpoint.generation))
        return hello

    def _refusal(self, hello: Hello) -> str | None:
        if self._closing:
            return "closing"
        if not _same_token(self._endpoint.token, hello.token):
            return "token"
        return None if self._endpoint.generations.admit(hello.role, hello.generation) else "generation"

    async def _run(self, stream: Stream) -> None:
        for other in list(self.streams):
            if _supersedes(stream.peer, other.peer):
                other.break_off("superseded")
        self.streams.append(stream)
        try:
            await stream.run(self._make_handler)
        finally:
            self.streams.remove(stream)


async def serve(endpoint: Endpoint, host: str, port: int, make_handler: MakeHandler) -> Server:
    """Listen; port 0 takes a free one, see `Server.port`. Raises TransportError when the port is in use."""
    server = Server(endpoint, make_handler)
    await server.start(host, port)
    return server


async def dial(endpoint: Endpoint, address: str, make_handler: MakeHandler) -> Stream:
    """Open a stream to host:port within `connect_s`. Raises DialError or RefusedError."""
    channel = grpc.aio.insecure_channel(address, options=_grpc_options(endpoint.options))
    try:
        async with asyncio.timeout(endpoint.options.connect_s):
            call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")()
            peer = await _introduce(endpoint, address, _Pipe(call))
    except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
        await channel.close()
        raise DialError(address, first_line(error)) from error
    except (TimeoutError, FrameError) as error:
        await channel.close()
        raise DialError(address, str(error) or f"no answer in {endpoint.options.connect_s} s") from error
    except BaseException:
        await channel.close()
        raise
    stream = endpoint.open_stream(_Pipe(call), peer)
    task = asyncio.create_task(_run_dialed(stream, call, channel, make_handler))
    stream.closed.add_done_callback(lambda _: task)  # the loop holds tasks weakly; the stream keeps its own alive
    return stream


async def _introduce(endpoint: Endpoint, address: str, pipe: _Pipe) -> Hello:
    await pipe.exchange_one(endpoint, Hello(endpoint.role, endpoint.id, endpoint.generation, endpoint.token))
    answer = await pipe.read_one(endpoint)
    if isinstance(answer, Refused):
        raise RefusedError(address, answer.reason, answer.highest_generation)
    if not isinstance(answer, Welcome):
        raise FrameError("malformed", f"{type(answer).__name__} instead of a welcome")
    if not endpoint.generations.admit(answer.role, answer.generation):
        raise RefusedError(address, "generation", endpoint.generations.highest(answer.role), stale_peer=True)
    return Hello(answer.role, answer.id, answer.generation)


async def _run_dialed(
    stream: Stream, call: grpc.aio.StreamStreamCall, channel: grpc.aio.Channel, make_handler: MakeHandler
) -> None:
    """After a graceful close the call ends once the peer has read all; cancelling earlier would lose messages."""
    try:
        await stream.run(make_handler)
        if stream.was_closed_here:
            await asyncio.wait((asyncio.ensure_future(call.code()),), timeout=stream.close_s)
    finally:
        call.cancel()
        await channel.close()


def _supersedes(new: Hello, old: Hello) -> bool:
    if new.role != old.role:
        return False
    return new.id == old.id or (new.role in RANKED_ROLES and old.generation < new.generation)


def _same_token(expected: str | None, given: str | None) -> bool:
    return expected is None or hmac.compare_digest(expected.encode(), (given or "").encode())


def _grpc_options(options: StreamOptions) -> list[tuple[str, int]]:
    """gRPC's own size limit guards the memory. It is above ours, which counts: what gRPC refuses looks like an end.

    Proxies would see cluster addresses; a shared subchannel pool would delay a redial by another try's backoff.
    """
    most_bytes = _GRPC_LIMIT_FACTOR * options.limits.frame_bytes
    return [
        ("grpc.max_receive_message_length", most_bytes),
        ("grpc.max_send_message_length", most_bytes),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.so_reuseport", 0),
    ]
