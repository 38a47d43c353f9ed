"""Processor time of parts of a thread."""

import time


class Stopwatch:
    """Processor time of this thread inside its `with` blocks; a block inside another counts once."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._depth = 0
        self._entered_s = 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._entered_s = time.thread_time()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.total_s += time.thread_time() - self._entered_s
