"""Ctrl-C, SIGTERM and a closed terminal end a command in the same way: KeyboardInterrupt in the main thread, once.

Signals that come while it is stopping are ignored, so that an impatient second Ctrl-C leaves nothing running.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Installed in the main thread, for the life of the command."""

    def __init__(self) -> None:
        self._stopping = False
        self._held = False
        self._came_while_held = False

    def install(self) -> None:
        """Call it again after what may set handlers of its own."""
        assert threading.current_thread() is threading.main_thread()
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)

    def ignore(self) -> None:
        """The command is stopping by itself: let no signal break that off."""
        self._stopping = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal inside the block takes effect at its end: for what, cut short, leaves processes behind."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._came_while_held:
            raise KeyboardInterrupt

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        if self._stopping:
            return
        self._stopping = True
        if not self._held:
            raise KeyboardInterrupt
        self._came_while_held = True


def wait_for_signal() -> None:
    """Block until a stop signal raises KeyboardInterrupt."""
    forever = threading.Event()
    while True:
        forever.wait(3600)
