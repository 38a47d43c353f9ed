"""Frames survive a round trip; bad bytes raise FrameError with the right reason and nothing else."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.frames import VERSION, Frame, FrameError, Heartbeat, Hello, Limits, Payload, decode_frame, encode_frames
from kvstate.protocol import Check, Draft, Drafted, Key, Open, Probed, Sampling, Timing, Verdict

LIMITS = Limits(frame_bytes=4096, frame_messages=8)
MESSAGES: list[Payload] = [
    Hello("router", "r", 3, "secret"),
    Open(1, (1, 2, 3), 3, Sampling(temperature=0.8, seed=2**64 - 1)),
    Check(1, Key(2, 5), 3, 3, (7, 8), 2),
    Drafted(1, Key(2, 4), (7, 8), 3, 4, Timing(1, 2, 1, 0.001, 0.0)),
    Verdict(1, Key(2, 5), 0, 9, 3, 3, Timing(), tops=(((9, 0.5), (7, 0.25)),)),
    Probed(1, Key(2, 6), 2, (8, None), 3, 3, Timing(), (((8, 1.0),), ())),
    Heartbeat(),
]


def test_round_trip_keeps_types_order_and_generation() -> None:
    (data,) = encode_frames(9, MESSAGES, LIMITS)
    frame = decode_frame(data, LIMITS)
    assert frame == Frame(VERSION, 9, MESSAGES)
    check = frame.messages[2]
    assert isinstance(check, Check)
    assert check.key.step == 5


def test_a_frame_is_plain_msgpack_whose_messages_name_their_type() -> None:
    (data,) = encode_frames(9, [Hello("replica", "x")], LIMITS)
    assert msgpack.unpackb(data) == [VERSION, 9, [["Hello", "replica", "x", 0, None]]]


def test_many_messages_are_split_over_frames_in_order() -> None:
    messages = [Check(seq, Key(0, 0), 0, 0, (1,), 1) for seq in range(41)]
    frames = [decode_frame(data, LIMITS) for data in encode_frames(0, messages, LIMITS)]
    assert [message for frame in frames for message in frame.messages] == messages
    assert max(len(frame.messages) for frame in frames) <= LIMITS.frame_messages


def test_large_messages_are_split_by_size_and_one_too_large_is_an_error() -> None:
    big = Check(1, Key(0, 0), 0, 0, tuple(range(1000)), 1)
    frames = encode_frames(0, [big, big, big], LIMITS)
    assert len(frames) == 3
    assert all(len(data) <= LIMITS.frame_bytes for data in frames)
    with pytest.raises(FrameError, match="one Check takes") as caught:
        encode_frames(0, [Check(1, Key(0, 0), 0, 0, tuple(range(4000)), 1)], LIMITS)
    assert caught.value.reason == "oversize"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "malformed"),
        (b"hello", "malformed"),
        (msgpack.packb({"version": 1}), "malformed"),
        (msgpack.packb([VERSION, 0, [["NoSuchMessage", 1]]]), "malformed"),
        (msgpack.packb([VERSION, 0, [["Close", "not a number"]]]), "malformed"),
        (msgpack.packb([VERSION, 0, [["Close", 1, "extra"]]]), "malformed"),
        (msgpack.packb([VERSION, 0, [["Hello", b"\xff".decode("latin1")]]])[:-2] + b"\xff\xff", "malformed"),
        (b"\x93\x01\x00\xdd\xff\xff\xff\xff", "malformed"),
        (msgpack.packb([VERSION + 1, "what", "a later version has"]), "version"),
        (msgpack.packb([VERSION, 0, [["Heartbeat"]] * 9]), "oversize"),
        (b"\x93\x01" + bytes(5000), "oversize"),
    ],
)
def test_bad_bytes_raise_with_their_reason(data: bytes, reason: str) -> None:
    with pytest.raises(FrameError) as caught:
        decode_frame(data, LIMITS)
    assert caught.value.reason == reason


@given(st.binary(max_size=200), st.integers(0, 60))
def test_any_bytes_raise_frame_error_or_decode(noise: bytes, position: int) -> None:
    (good,) = encode_frames(1, MESSAGES, LIMITS)
    spliced = good[:position] + noise + good[position + len(noise) :]
    for data in (noise, good[:position], good[:position] + noise, spliced):
        assert _outcome(data) in {"frame", "malformed", "version", "oversize"}


def _outcome(data: bytes) -> str:
    try:
        decode_frame(data, LIMITS)
    except FrameError as error:
        return error.reason
    return "frame"


def test_what_msgpack_cannot_say_is_a_frame_error() -> None:
    with pytest.raises(FrameError, match="unencodable"):
        encode_frames(0, [Draft(1, Key(1, 1), 1, 0, (2**70,), 1)], Limits())
