"""Streams over real sockets on 127.0.0.1."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio
import msgpack
import pytest

from cluster.dialer import Backoff, Dialer
from cluster.frames import VERSION, Heartbeat, Hello, Limits, Payload
from cluster.stream import Stream, StreamOptions
from cluster.transport import DialError, Endpoint, RefusedError, Server, TransportError, dial, serve
from kvstate.protocol import AnyMessage, Close, Open, Sampling

PATIENCE_S = 5.0
FAST = StreamOptions(
    heartbeat_s=0.05, connect_s=1.0, close_s=3.0, limits=Limits(frame_bytes=65_536, frame_messages=512)
)
QUIET = replace(FAST, heartbeat_s=60.0, close_s=20.0)


class Recorder:
    """Handler of one stream that keeps all it gets; `reply` answers each message."""

    def __init__(self, stream: Stream, reply: Callable[[AnyMessage], AnyMessage] | None = None) -> None:
        self.stream = stream
        self.calls: list[list[AnyMessage]] = []
        self.closed: list[str] = []
        self._reply = reply
        self._arrived = asyncio.Event()

    @property
    def messages(self) -> list[AnyMessage]:
        return [message for call in self.calls for message in call]

    def on_messages(self, messages: Sequence[AnyMessage]) -> None:
        self.calls.append(list(messages))
        self._arrived.set()
        if self._reply is not None:
            for message in messages:
                self.stream.send(self._reply(message))

    def on_closed(self, reason: str) -> None:
        self.closed.append(reason)

    async def wait_for(self, count: int) -> list[AnyMessage]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.messages) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return self.messages


class Side:
    """Makes a Recorder per stream and tells of new ones."""

    def __init__(self, reply: Callable[[AnyMessage], AnyMessage] | None = None) -> None:
        self.recorders: list[Recorder] = []
        self._reply = reply
        self._opened = asyncio.Event()

    def __call__(self, stream: Stream) -> Recorder:
        self.recorders.append(Recorder(stream, self._reply))
        self._opened.set()
        return self.recorders[-1]

    async def opened(self, count: int = 1) -> Recorder:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.recorders) < count:
                self._opened.clear()
                await self._opened.wait()
        return self.recorders[count - 1]


@asynccontextmanager
async def serving(endpoint: Endpoint, side: Side, port: int = 0) -> AsyncIterator[Server]:
    server = await serve(endpoint, "127.0.0.1", port, side)
    try:
        yield server
    finally:
        await server.stop()


def _replica(options: StreamOptions = QUIET, token: str | None = None) -> Endpoint:
    return Endpoint("replica", "m-0", options=options, token=token)


def _router(generation: int = 1, options: StreamOptions = QUIET, token: str | None = None) -> Endpoint:
    return Endpoint("router", f"router-{generation}", generation, options=options, token=token)


def _address(server: Server) -> str:
    return f"127.0.0.1:{server.port}"


async def _end_of(stream: Stream) -> str:
    return await asyncio.wait_for(asyncio.shield(stream.closed), PATIENCE_S)


@asynccontextmanager
async def raw_call(server: Server, *frames: bytes) -> AsyncIterator[grpc.aio.StreamStreamCall]:
    """A peer that writes bytes of its own choice."""
    async with grpc.aio.insecure_channel(_address(server)) as channel:
        call = channel.stream_stream("/specrelay.Transport/Connect")()
        for data in frames:
            await call.write(data)
        yield call
        call.cancel()


HELLO = msgpack.packb([VERSION, 0, [["Hello", "ingress", "raw", 0, None]]])


async def test_sends_of_one_tick_leave_in_one_frame_in_order() -> None:
    here, there = Side(), Side()
    async with serving(_replica(), there) as server:
        stream = await dial(_router(), _address(server), here)
        far = await there.opened()
        await asyncio.sleep(0)
        before = stream.frames_sent
        for seq in range(50):
            stream.send(Close(seq))
        assert await far.wait_for(50) == [Close(seq) for seq in range(50)]
        assert [len(call) for call in far.calls] == [50]
        assert stream.frames_sent - before <= 2  # with the first heartbeat, if it had not left yet
        assert stream.peer == Hello("replica", "m-0", 0)
        assert far.stream.peer == Hello("router", "router-1", 1)
        stream.close()
        await _end_of(stream)


async def test_both_directions_and_many_messages_keep_their_order() -> None:
    here, there = Side(), Side(reply=lambda message: message)
    async with serving(_replica(), there) as server:
        stream = await dial(_router(), _address(server), here)
        near = await here.opened()
        for seq in range(3000):
            stream.send(Close(seq))
            if seq % 7 == 0:
                await asyncio.sleep(0)
        assert await near.wait_for(3000) == [Close(seq) for seq in range(3000)]
        assert max(len(call) for call in near.calls) <= FAST.limits.frame_messages
        stream.close()


async def test_close_delivers_what_was_sent_before_and_sending_afterwards_does_nothing() -> None:
    here, there = Side(), Side()
    async with serving(_replica(), there) as server:
        stream = await dial(_router(), _address(server), here)
        for seq in range(2000):
            stream.send(Close(seq))
        stream.close("done")
        stream.send(Close(-1))
        assert await _end_of(stream) == "done"
        stream.send(Close(-2))
        far = await there.opened()
        assert await _end_of(far.stream) == "closed by peer"
        assert far.messages == [Close(seq) for seq in range(2000)]
        assert (here.recorders[0].closed, far.closed) == (["done"], ["closed by peer"])
        assert server.streams == []


async def test_server_stop_delivers_what_was_sent_before() -> None:
    here, there = Side(), Side()
    server = await serve(_replica(), "127.0.0.1", 0, there)
    stream = await dial(_router(), _address(server), here)
    far = await there.opened()
    for seq in range(500):
        far.stream.send(Close(seq))
    await server.stop()
    await _end_of(stream)
    assert here.recorders[0].messages == [Close(seq) for seq in range(500)]


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"not a frame", "malformed"),
        (msgpack.packb([VERSION, 0, [["NoSuch", 1]]]), "malformed"),
        (msgpack.packb([VERSION, 0, [["Hello", "router", "again", 1, None]]]), "malformed"),
        (msgpack.packb([VERSION + 1, 0, []]), "version"),
        (msgpack.packb([VERSION, 7, [["Close", 1]]]), "generation"),
        (b"\x93\x01" + bytes(66_000), "oversize"),
        (b"\x93\x01" + bytes(250_000), "oversize"),
    ],
)
async def test_a_bad_frame_ends_that_stream_only_and_is_counted(frame: bytes, reason: str) -> None:
    here, there = Side(), Side()
    endpoint = _replica()
    async with serving(endpoint, there) as server:
        good = await dial(_router(), _address(server), here)
        await there.opened(1)
        async with raw_call(server, HELLO) as call:
            bad = await there.opened(2)
            await call.write(frame)
            assert await _end_of(bad.stream) == f"bad frame: {reason}"
        assert dict(endpoint.stats.bad_frames) == {reason: 1}
        good.send(Close(1))
        assert await there.recorders[0].wait_for(1) == [Close(1)]
        good.close()


@pytest.mark.parametrize("greeting", [b"junk", msgpack.packb([VERSION, 0, [["Close", 1]]]), msgpack.packb([2, 0, []])])
async def test_a_bad_greeting_opens_no_stream(greeting: bytes) -> None:
    there = Side()
    endpoint = _replica()
    async with serving(endpoint, there) as server, raw_call(server, greeting) as call:
        assert await asyncio.wait_for(call.read(), PATIENCE_S) is grpc.aio.EOF
        assert sum(endpoint.stats.bad_frames.values()) == 1
        assert there.recorders == []


async def test_a_peer_that_says_nothing_is_let_go_after_the_deadline() -> None:
    endpoint = _replica(replace(QUIET, connect_s=0.1))
    async with serving(endpoint, Side()) as server, raw_call(server) as call:
        assert await asyncio.wait_for(call.read(), PATIENCE_S) is grpc.aio.EOF
        assert dict(endpoint.stats.bad_frames) == {"no hello": 1}


async def test_a_message_too_large_to_send_ends_the_stream_with_its_reason() -> None:
    here, there = Side(), Side()
    async with serving(_replica(), there) as server:
        stream = await dial(_router(), _address(server), here)
        stream.send(Open(1, tuple(range(40_000)), 1, Sampling()))
        assert await _end_of(stream) == "bad frame: oversize"


async def test_a_full_outbox_breaks_the_stream_with_its_reason() -> None:
    here, there = Side(), Side()
    async with serving(_replica(), there) as server:
        stream = await dial(_router(options=replace(QUIET, max_outbox_messages=100)), _address(server), here)
        for seq in range(102):
            stream.send(Close(seq))
        assert await _end_of(stream) == "outbox full"


async def test_an_exception_in_a_handler_ends_the_stream_not_the_process(caplog: pytest.LogCaptureFixture) -> None:
    def fail(message: AnyMessage) -> AnyMessage:
        raise ZeroDivisionError

    here, there = Side(), Side(reply=fail)
    async with serving(_replica(), there) as server:
        stream = await dial(_router(), _address(server), here)
        stream.send(Close(1))
        far = await there.opened()
        assert await _end_of(far.stream) == "handler failed"
        assert await _end_of(stream) == "closed by peer"
        assert "ZeroDivisionError" in caplog.text


async def test_a_lower_generation_is_refused_and_a_higher_one_ends_the_older_stream() -> None:
    there = Side()
    endpoint = _replica()
    async with serving(endpoint, there) as server:
        second = await dial(_router(generation=2), _address(server), Side())
        with pytest.raises(RefusedError) as caught:
            await dial(_router(generation=1), _address(server), Side())
        assert (caught.value.reason, caught.value.highest_generation) == ("generation", 2)
        assert second.is_open
        third = await dial(_router(generation=3), _address(server), Side())
        assert await _end_of(there.recorders[0].stream) == "superseded"
        await _end_of(second)
        assert third.is_open
        assert dict(endpoint.stats.refused_hellos) == {"generation": 1}
        third.close()


async def test_a_replica_refuses_a_coordinator_older_than_one_it_knew() -> None:
    replica = _replica()
    old, new = (Endpoint("coordinator", f"c-{number}", number, options=QUIET) for number in (1, 2))
    async with serving(old, Side()) as old_server, serving(new, Side()) as new_server:
        stream = await dial(replica, _address(new_server), Side())
        with pytest.raises(RefusedError) as caught:
            await dial(replica, _address(old_server), Side())
        assert caught.value.stale_peer
        stream.close()


async def test_the_same_peer_coming_again_replaces_its_half_dead_stream() -> None:
    there = Side()
    async with serving(_replica(), there) as server:
        await dial(_router(), _address(server), Side())
        again = await dial(_router(), _address(server), Side())
        await there.opened(2)
        assert await _end_of(there.recorders[0].stream) == "superseded"
        assert [stream.peer for stream in server.streams] == [Hello("router", "router-1", 1)]
        again.close()


async def test_the_stream_token_is_checked() -> None:
    async with serving(_replica(token="sésame"), Side()) as server:
        for token in (None, "wrong"):
            with pytest.raises(RefusedError, match="token"):
                await dial(_router(token=token), _address(server), Side())
        stream = await dial(_router(token="sésame"), _address(server), Side())
        assert stream.is_open
        assert "sésame" not in repr(_router(token="sésame"))
        stream.close()


class Cut:
    """A link that swallows everything once it is cut."""

    def __init__(self) -> None:
        self.is_cut = False

    def delay_s(self, message: Payload) -> float | None:
        return None if self.is_cut else 0.0


async def test_missed_heartbeats_break_a_silent_stream_and_sent_ones_keep_it() -> None:
    cut = Cut()
    here, there = Side(), Side()
    async with serving(_replica(FAST), there) as server:
        stream = await dial(replace(_router(options=FAST), faults=cut), _address(server), here)
        far = await there.opened()
        await asyncio.sleep(8 * FAST.heartbeat_s)
        assert stream.is_open
        assert far.stream.is_open
        started_s = asyncio.get_running_loop().time()
        cut.is_cut = True
        assert await _end_of(far.stream) == "heartbeats missed"
        assert asyncio.get_running_loop().time() - started_s >= FAST.heartbeat_s / 2
        await _end_of(stream)


class Scripted:
    """Loses messages with odd numbers, holds the others for 30 ms."""

    def delay_s(self, message: Payload) -> float | None:
        if isinstance(message, Heartbeat):
            return 0.0
        return None if isinstance(message, Close) and message.seq % 2 else 0.03


async def test_faults_lose_and_delay_messages_without_changing_their_order() -> None:
    here, there = Side(), Side()
    endpoint = replace(_router(), faults=Scripted())
    async with serving(_replica(), there) as server:
        stream = await dial(endpoint, _address(server), here)
        far = await there.opened()
        started_s = asyncio.get_running_loop().time()
        for seq in range(100):
            stream.send(Close(seq))
        assert await far.wait_for(50) == [Close(seq) for seq in range(0, 100, 2)]
        assert asyncio.get_running_loop().time() - started_s >= 0.03
        assert endpoint.stats.messages_lost_to_faults == 50
        stream.close()


async def test_dialing_nobody_fails_within_the_deadline() -> None:
    async with serving(_replica(), Side()) as server:
        address = _address(server)
    with pytest.raises(DialError) as caught:
        await asyncio.wait_for(dial(_router(), address, Side()), PATIENCE_S)
    assert address in str(caught.value)


async def test_a_port_in_use_is_an_error() -> None:
    async with serving(_replica(), Side()) as server:
        with pytest.raises(TransportError, match=f"cannot listen at 127.0.0.1:{server.port}"):
            await serve(_replica(), "127.0.0.1", server.port, Side())


async def test_a_dialer_reconnects_after_the_peer_restarted() -> None:
    here, there, after = Side(), Side(), Side()
    server = await serve(_replica(), "127.0.0.1", 0, there)
    addresses = [_address(server)]

    async def resolve() -> str:
        if not addresses:
            raise LookupError("nobody yet")
        return addresses[0]

    dialer = Dialer(_router(), resolve, here, Backoff(first_s=0.01, most_s=0.05))
    dialer.start()
    try:
        first = await here.opened(1)
        addresses.clear()
        await server.stop()
        await _end_of(first.stream)
        async with serving(_replica(), after) as restarted:
            addresses.append(_address(restarted))
            second = await here.opened(2)
            second.stream.send(Close(5))
            assert await (await after.opened()).wait_for(1) == [Close(5)]
            assert dialer.stream is second.stream
            await dialer.stop("finished")
            assert await _end_of(second.stream) == "finished"
    finally:
        await dialer.stop()
    assert dialer.stream is None


async def test_a_dialer_tells_of_refusals() -> None:
    refused: asyncio.Future[RefusedError] = asyncio.get_running_loop().create_future()
    async with serving(_replica(), Side()) as server:
        newer = await dial(_router(generation=2), _address(server), Side())

        async def resolve() -> str:
            return _address(server)

        outdated = Dialer(_router(generation=1), resolve, Side(), Backoff(first_s=0.01), refused.set_result)
        outdated.start()
        error = await asyncio.wait_for(refused, PATIENCE_S)
        await outdated.stop()
        assert error.highest_generation == 2
        newer.close()
