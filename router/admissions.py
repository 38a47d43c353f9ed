"""What the router and the coordinator say of a sequence's life: room is asked for, and its end is told.

A coordinator may be away or be another one than before: openings wait for it, ends that it was not told of are kept,
and `coordinator_connected` says both again.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvstate.protocol import Admit, Admitted, Finish
from router.links import Outbound

RETRY_AFTER_S = 1.0
OVERLOAD_S = 1.0
"""Of a wait for room, from which on more requests come than there is room for."""

MOST_UNSENT = 100_000
"""Ends that no coordinator could be told of; those beyond are left to the leases of the sequences."""


class Refused(Exception):
    """The request ends with an error of this code (as in HTTP)."""

    def __init__(self, code: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(code, message, retry_after_s)
        self.code, self.message, self.retry_after_s = code, message, retry_after_s


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An opening that was not answered yet; since `since_s`."""

    admit: Admit
    answer: asyncio.Future[Admitted]
    since_s: float


class Admissions:
    """`max_queue`: how many openings may wait while there is no coordinator, whose queue it is otherwise."""

    def __init__(self, outbound: Outbound, max_queue: int, clock: Callable[[], float]) -> None:
        self._outbound = outbound
        self._max_queue = max_queue
        self._clock = clock
        self._waiting: dict[int, _Waiting] = {}  # in order of asking
        self._unsent: deque[Finish] = deque(maxlen=MOST_UNSENT)

    @property
    def is_overloaded(self) -> bool:
        """Whether the first of those that wait has waited for long."""
        first = next(iter(self._waiting.values()), None)
        return first is not None and self._clock() - first.since_s > OVERLOAD_S

    async def ask(self, admit: Admit) -> Admitted:
        """Holders of the sequence, as soon as there is room. Raises Refused. The caller's deadline bounds the wait;
        where it ends without an answer, so does the sequence.
        """
        answer: asyncio.Future[Admitted] = asyncio.get_running_loop().create_future()
        self._waiting[admit.seq] = _Waiting(admit, answer, self._clock())
        sent = self._outbound.to_coordinator(admit)
        if not sent and len(self._waiting) > self._max_queue:
            answer.set_exception(Refused(429, "the queue is full: retry later", RETRY_AFTER_S))
        try:
            admitted = await answer
        except BaseException:
            self.finish(admit.seq)
            raise
        finally:
            del self._waiting[admit.seq]
        if admitted.refusal is not None:
            raise Refused(admitted.code, admitted.refusal, RETRY_AFTER_S if admitted.code != 400 else None)
        return admitted

    def answered(self, message: Admitted) -> None:
        """One whose opening waits no longer is ignored."""
        waiting = self._waiting.get(message.seq)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_result(message)

    def finish(self, seq: int) -> None:
        """The sequence is over, now or as soon as there is a coordinator to tell."""
        if not self._outbound.to_coordinator(Finish(seq)):
            self._unsent.append(Finish(seq))

    def coordinator_connected(self) -> None:
        """To be called after it was told of the running sequences."""
        while self._unsent and self._outbound.to_coordinator(self._unsent[0]):
            self._unsent.popleft()
        for waiting in self._waiting.values():
            self._outbound.to_coordinator(waiting.admit)
