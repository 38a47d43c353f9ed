"""A link between two places of a cluster: messages arrive in order, after its latency and the time their bytes take."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvstate.protocol import Message

FRAME_BYTES = 64
"""What a frame adds to its messages, headers of all layers included; counted for each message, which bounds it."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """`mbit_s` None: no limit."""

    latency_ms: float = 0.3
    mbit_s: float | None = None


class Link:
    """One direction. `send` calls `deliver` when the message arrives."""

    def __init__(self, spec: LinkSpec) -> None:
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self._free_s = 0.0
        self._under_way: deque[tuple[Message, Callable[[Message], None]]] = deque()
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Message, deliver: Callable[[Message], None]) -> None:
        now_s = self._loop.time()
        if self._spec.mbit_s is not None:
            num_bytes = FRAME_BYTES + len(self._encoder.encode(message))
            self._free_s = max(self._free_s, now_s) + num_bytes * 8 / (self._spec.mbit_s * 1e6)
            now_s = self._free_s
        self._under_way.append((message, deliver))
        self._loop.call_at(now_s + self._spec.latency_ms / 1e3, self._arrive)

    def _arrive(self) -> None:
        """The oldest one: timers that are due together fire in any order."""
        message, deliver = self._under_way.popleft()
        deliver(message)
