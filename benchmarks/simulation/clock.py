"""An event loop whose time passes only while nothing is to be done: code that awaits timers runs unchanged, at once.

When no callback is ready, time jumps to the next timer. Two runs of the same code are the same, to the callback.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Nothing is ready and no timer is set: whoever waits would wait for ever."""


class _Selector(selectors.DefaultSelector):
    """Never blocks: what it is asked to wait passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise Deadlock
            self.now_s += max(0.0, timeout)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at second 0. For one thread, and without anything outside it."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._clock_resolution = 1e-9  # timers fire at their time and not up to a tick of the system's clock before

    def time(self) -> float:
        return self._virtual.now_s


def run(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`. Raises Deadlock."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.0))
        loop.close()
