"""What the target's verdicts made permanent, on its way to the coordinator.

No round waits for it, and those of a chain learn of it by their steps. So the rounds of `GATHER_S` go together: one
message for each sequence, in one frame for all.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstate.protocol import Committed
from router.links import Outbound

GATHER_S = 0.05


@dataclass(slots=True)
class _Gathered:
    from_len: int
    epoch: int = 0
    tokens: list[int] = field(default_factory=list)


class Commits:
    """Without a coordinator nothing is kept: one that comes back is told of whole sequences (`Resume`)."""

    def __init__(self, outbound: Outbound) -> None:
        self._outbound = outbound
        self._gathered: dict[int, _Gathered] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, seq: int, epoch: int, from_len: int, tokens: Sequence[int]) -> None:
        """Round `epoch` of `seq` committed `tokens` from position `from_len` on, where its last round's ended."""
        gathered = self._gathered.setdefault(seq, _Gathered(from_len))
        assert from_len == gathered.from_len + len(gathered.tokens), (seq, from_len, gathered)
        gathered.epoch = epoch
        gathered.tokens.extend(tokens)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._send)

    def forget(self, seq: int) -> None:
        """It ended, or the coordinator learned all of it in another way."""
        self._gathered.pop(seq, None)

    def _send(self) -> None:
        self._timer = None
        gathered, self._gathered = self._gathered, {}
        for seq, one in gathered.items():
            self._outbound.to_coordinator(Committed(seq, one.epoch, one.from_len, tuple(one.tokens)))
