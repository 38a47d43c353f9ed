"""Who gets room, and who waits for it. Pure; the ledger holds the promises."""

from collections.abc import Sequence

from kvstate.ledger import Ledger
from kvstate.protocol import Admit, Admitted

Answers = list[tuple[str, Admitted]]
"""Answers to routers: router id, message."""


class Admission:
    """A bounded queue before the target's replicas, in order of arrival: small requests never starve a large one.

    Only the target is waited for: other models are left out of a sequence when they have no room for it.
    """

    def __init__(self, ledger: Ledger, models: Sequence[str], max_waiting: int) -> None:
        self._ledger = ledger
        self._models = tuple(models)
        self._max_waiting = max_waiting
        self._waiting: dict[int, tuple[str, Admit]] = {}  # in order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, router_id: str, admit: Admit, now: float) -> Answers:
        """Answer now, or queue: then `serve` answers later. Asking again is harmless."""
        entry = self._ledger.running.get(admit.seq)
        if entry is not None:
            return [(router_id, Admitted(admit.seq, entry.replica_ids()))]
        self._waiting[admit.seq] = (router_id, admit)
        answers = self.serve(now)
        if len(self._waiting) > self._max_waiting:
            del self._waiting[admit.seq]
            refusal = f"{self._max_waiting} requests are waiting for room already"
            answers.append((router_id, Admitted(admit.seq, {}, refusal, 429)))
        return answers

    def serve(self, now: float) -> Answers:
        """Refuse what can never be, and admit in order until the first that must wait."""
        answers: Answers = []
        blocked = False
        for seq, (router_id, admit) in list(self._waiting.items()):
            refusal = self._refusal(admit)
            blocked = blocked or (refusal is None and not self._has_room(admit))
            if refusal is not None:
                answers.append((router_id, Admitted(seq, {}, *refusal)))
            elif not blocked:
                answers.append((router_id, Admitted(seq, self._place(router_id, admit, now))))
            else:
                continue
            del self._waiting[seq]
        return answers

    def withdraw(self, seq: int) -> None:
        self._waiting.pop(seq, None)

    def withdraw_all(self, router_id: str) -> None:
        self._waiting = {seq: waiter for seq, waiter in self._waiting.items() if waiter[0] != router_id}

    def check_integrity(self) -> None:
        assert len(self._waiting) <= self._max_waiting
        assert not self._waiting.keys() & self._ledger.running.keys()
        if self._waiting:
            _, first = next(iter(self._waiting.values()))
            assert self._refusal(first) is None, f"{first} waits in vain"
            assert not self._has_room(first), f"{first} waits for nothing"

    def _refusal(self, admit: Admit) -> tuple[str, int] | None:
        """Why it can never be admitted, and the code."""
        if self._ledger.is_closed(admit.seq):
            return f"sequence {admit.seq} is closed", 503
        if self._ledger.never_fits(self._models[-1], admit.max_len):
            fix = "shorten the prompt or lower max_tokens"
            return f"{admit.max_len} tokens of prompt and output fit on no replica of {self._models[-1]}: {fix}", 400
        return None

    def _has_room(self, admit: Admit) -> bool:
        target = self._models[-1]
        return self._ledger.best_replica(target, admit.max_len, admit.preferred.get(target, ())) is not None

    def _place(self, router_id: str, admit: Admit, now: float) -> dict[str, str]:
        entry = self._ledger.start(admit.seq, router_id, admit.max_len, start_len=admit.prompt_len)
        wanted = {*(admit.models or self._models), self._models[-1]}
        for model in (name for name in self._models if name in wanted):
            replica = self._ledger.best_replica(model, admit.max_len, admit.preferred.get(model, ()))
            if replica is not None:
                # The router opens the copy with the whole prompt before anything is committed.
                self._ledger.attach(entry, model, replica.info.replica_id, from_len=admit.prompt_len, now=now)
        return entry.replica_ids()
