"""How long a forward waits for sequences that are about to come back. Pure.

A forward costs its base however few sequences take part, and sequences that are split over two forwards in turn stay
so for ever: while one part computes, the other one's next steps arrive. So after a forward the engine waits for those
it just answered, as long as they usually take and never longer than the base that a second forward would cost.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

MOST_RETURNS = 4.0
"""Mean times to return for which the last is waited: of many, answered at once, the router tells one after another."""

SHARE = 0.05
"""What the newest return counts in the mean."""


@dataclass(slots=True)
class Gathering:
    """`base_s`: of a forward, by the profile at load; `return_s`: mean time from an answer to the next step."""

    base_s: float = 0.0
    return_s: float = 0.0
    _answered_s: dict[int, float] = field(default_factory=dict)
    _expected: set[int] = field(default_factory=set)
    _ended_s: float = 0.0

    def answered(self, seqs: Iterable[int], now_s: float) -> None:
        """By the forward that just ended."""
        self._expected, self._ended_s = set(seqs), now_s
        self._answered_s.update((seq, now_s) for seq in self._expected)

    def returned(self, seq: int, arrived_s: float) -> None:
        """Its next step, which may have come while a forward ran."""
        self._expected.discard(seq)
        answered_s = self._answered_s.pop(seq, None)
        if answered_s is not None:
            self.return_s += SHARE * (arrived_s - answered_s - self.return_s)

    def forget(self, seq: int) -> None:
        self._expected.discard(seq)
        self._answered_s.pop(seq, None)

    def left_s(self, now_s: float) -> float:
        """How much longer to wait; 0 or less: not at all."""
        if not self._expected or self.return_s > self.base_s:
            return 0.0
        return self._ended_s + min(MOST_RETURNS * self.return_s, self.base_s) - now_s
