"""Lines that tell what a start is doing and how long it has taken. On a terminal the present line spins."""

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status


class StartProgress:
    """Call it with each new line; a finished step keeps its line with the seconds since the start."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._start_s = clock()
        self._last = ""
        self._spinner: Status | None = console.status("starting") if console.is_terminal else None

    def __enter__(self) -> "StartProgress":
        if self._spinner:
            self._spinner.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is under way any more: no spinner. Lines may still follow."""
        if self._spinner:
            self._spinner.stop()

    def __call__(self, line: str) -> None:
        """Print the line once; a repeated line says nothing new."""
        if line == self._last:
            return
        self._last = line
        elapsed_s = self._clock() - self._start_s
        self._console.print(f"[dim]{elapsed_s:6.1f} s[/dim]  {escape(line)}", highlight=False)
        if self._spinner:
            self._spinner.update(f"{escape(line)} …")
