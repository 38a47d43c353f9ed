"""What all Serve shells share: a stream's callbacks as plain functions, and where this process can be reached."""

import os
import time
from collections.abc import Callable, Sequence

import ray

from cluster.transport import Endpoint
from kvstate.protocol import AnyMessage


class Callbacks:
    """A stream's handler made of two functions."""

    def __init__(self, on_message: Callable[[AnyMessage], None], on_closed: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_closed = on_closed

    def on_messages(self, messages: Sequence[AnyMessage]) -> None:
        for message in messages:
            self._on_message(message)

    def on_closed(self, reason: str) -> None:
        del reason
        self._on_closed()


def endpoint(role: str, name: str, token_env: str | None, generation: int = 0) -> Endpoint:
    token = os.environ[token_env] if token_env is not None else None
    return Endpoint(role, name, generation, token)


def new_generation() -> int:
    """Rises from start to start: milliseconds of the wall clock."""
    return time.time_ns() // 1_000_000


def node_address() -> str:
    return str(ray.util.get_node_ip_address())
