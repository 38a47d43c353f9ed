"""A replica whose batches take no time but that of the clock: the real engine over an emulated model."""

import asyncio
from collections.abc import Callable, Sequence

from benchmarks.stopwatch import Stopwatch
from kvstate.protocol import Message, Profile
from models.emulated import EmulatedBackend, EmulateSpec
from models.engine import Engine, Forward

NUM_BLOCKS, BLOCK_TOKENS = 20_000, 16


def no_sleep(duration_s: float) -> None:
    del duration_s


class SimulatedReplica:
    """`submit` as messages arrive; replies go to whom they are sent to, by the sender's name. `watch` times it all."""

    def __init__(
        self, name: str, rank: int, spec: EmulateSpec, reply: Callable[[str, Message], None], watch: Stopwatch
    ) -> None:
        self.spec = spec
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._reply = reply
        self.backend = EmulatedBackend(name, rank, spec, NUM_BLOCKS, BLOCK_TOKENS, sleep=no_sleep)
        self.engine = Engine(self.backend, self._deliver, clock=self._loop.time)
        self.engine.assume(self.profile)
        self._timer: asyncio.Handle | None = None
        self._is_computing = False

    @property
    def profile(self) -> Profile:
        return Profile(max(1e-3, self.spec.base_ms), self.spec.per_token_ms, self.spec.per_sequence_ms)

    def submit(self, sender: str, message: Message) -> None:
        with self._watch:
            self.engine.submit(sender, [message])
            if not self._is_computing:
                self._look_again()

    def _look_again(self, after_s: float = 0.0) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(after_s, self._begin) if after_s else self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._timer = None
        with self._watch:
            left_s = self.engine.gathers_for_s()
            if left_s > 0.0:
                self._look_again(left_s)
                return
            forward = self.engine.begin()
            if forward is None:
                return
            self._is_computing = True
            spec = self.spec
            took_ms = spec.base_ms + spec.per_token_ms * forward.rows + spec.per_sequence_ms * forward.sequences
            took_s = took_ms / 1e3 if forward.rows else 0.0
            self._loop.call_later(took_s, self._end, forward, took_s)

    def _end(self, forward: Forward, took_s: float) -> None:
        self._is_computing = False
        with self._watch:
            self.engine.end(forward, took_s)
            self._look_again()

    def _deliver(self, replies: Sequence[tuple[object, Message]]) -> None:
        for sender, message in replies:
            assert isinstance(sender, str)
            self._reply(sender, message)
