"""Frames: what travels on a stream, as msgpack.

A frame is the array `[version, generation, messages]`; a message is an array whose first element names its type. Frames
carry the messages of `kvstate/protocol.py` and the four control messages below. Decoding builds typed structs and
nothing else, so a frame can be wrong but not dangerous: no pickle, no class names from outside, bounded size and count.

This module knows neither sockets nor streams.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvstate.protocol import AnyMessage, Message

VERSION = 1
"""Below 128 for ever: it is then one byte at a fixed place, readable whatever the rest of the frame has become."""

_ARRAY_OF_THREE = 0x93


class FrameError(Exception):
    """A frame that cannot be used. `reason` is one of a few words (a metric label), `detail` is for the log."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest frame in bytes and most messages in one frame, in both directions."""

    frame_bytes: int = 16 * 1024 * 1024
    frame_messages: int = 4096


class Hello(Message, frozen=True):
    """First message of who dials. `role` is `ingress`, `router`, `coordinator` or `replica`; `id` is unique."""

    role: str
    id: str
    generation: int = 0
    token: str | None = None


class Welcome(Message, frozen=True):
    """Answer to a hello: who was reached. Messages follow."""

    role: str
    id: str
    generation: int = 0


class Refused(Message, frozen=True):
    """Answer to a hello that is not served, and the end of the stream. `reason`: `generation`, `token` or `closing`."""

    reason: str
    highest_generation: int = 0


class Heartbeat(Message, frozen=True):
    """Says that the sender lives; sent at a fixed interval, whatever else is sent."""


Control = Hello | Welcome | Refused | Heartbeat
Payload = AnyMessage | Control


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`generation` is that of the sender, 0 for roles that have none."""

    version: int
    generation: int
    messages: list[Payload]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frames(generation: int, messages: Sequence[Payload], limits: Limits) -> list[bytes]:
    """The messages in order, in few frames. Raises FrameError when one message alone is beyond the limits,
    or holds what msgpack cannot say.
    """
    if len(messages) <= limits.frame_messages:
        try:
            data = _encoder.encode(Frame(VERSION, generation, list(messages)))
        except (OverflowError, TypeError, UnicodeEncodeError) as error:
            raise FrameError("unencodable", str(error)) from error
        if len(data) <= limits.frame_bytes:
            return [data]
        if len(messages) == 1:
            raise FrameError("oversize", f"one {type(messages[0]).__name__} takes {len(data)} bytes")
    half = min(len(messages) // 2, limits.frame_messages)
    return encode_frames(generation, messages[:half], limits) + encode_frames(generation, messages[half:], limits)


def decode_frame(data: bytes, limits: Limits) -> Frame:
    """Raises FrameError with reason `oversize`, `malformed` or `version`; never anything else."""
    if len(data) > limits.frame_bytes:
        raise FrameError("oversize", f"{len(data)} bytes")
    if len(data) < 2 or data[0] != _ARRAY_OF_THREE:
        raise FrameError("malformed", "no frame header")
    if data[1] != VERSION:
        raise FrameError("version", f"{data[1]}, expected {VERSION}")
    try:
        frame = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError("malformed", str(error)) from error
    if len(frame.messages) > limits.frame_messages:
        raise FrameError("oversize", f"{len(frame.messages)} messages")
    return frame
