"""One request's rounds: draft, check level by level, commit the target's verdict, again.

The nested rule: level 1 drafts windows[0] tokens; as soon as a level has delivered at least windows[i]
tokens, the next one checks all of them, keeps what equals its samples and adds its own token; up to the target. A round
lives on one stack of `held` tokens: `held[i]` waits for the check by chain[i]. A check empties its entry, and whenever
chain[i] checks, all entries below are empty; so the context of any step is committed + held[top] + … + held[i].

Nothing here knows Ray, sockets or tensors: steps go through `StepCalls`, plans come from a callable.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvstate.protocol import (
    Check,
    Draft,
    Drafted,
    FinishReason,
    Logprobs,
    Need,
    Open,
    Probe,
    Probed,
    Step,
    Timing,
    Verdict,
)
from router.checks import CheckSeen, Origin, origins_of
from router.links import Outbound, ReplicaLost, StepCalls
from router.plan import Plan
from router.sequence import Holder, Limits, RunningSequence, TargetCounts

ATTEMPTS = 4
"""Sends of one step before its replica counts as lost: two lost frames and a reopened sequence fit in.

A target that is only silent is waited for until the request's deadline: it may have long prompts of others before it,
and there is nothing to go on without it. A stream that breaks, as it does when heartbeats are missed, ends every wait.
"""

MOST_BEHIND, MOST_PROBE_BEHIND = 32, 128
CATCH_UP = "catch_up"
"""The kind of a step that computes more rows than rounds ever leave behind: a prefill, or a level that joins again."""


class Observer(Protocol):
    """What the table learns from a round."""

    def timing(self, holder: Holder, kind: str, timing: Timing, round_trip_s: float) -> None: ...

    def drafted(self, model: str, num_asked: int, num_drafted: int) -> None: ...

    def checked(self, seen: CheckSeen) -> None: ...


class TargetLost(Exception):
    """The target's replica is gone: the sequence must be rebuilt on another."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Newly committed output tokens of one round, cut where the request ends."""

    tokens: list[int]
    finish_reason: FinishReason | None
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class _Draft:
    """`parts`: who drafted, how many tokens it was asked for, and how many it gave."""

    tokens: list[int]
    parts: list[tuple[str, int, int]]

    @property
    def samplers(self) -> list[str]:
        """Of each token."""
        return [model for model, _, num_drafted in self.parts for _ in range(num_drafted)]


class RoundDriver:
    """Drives one sequence. The target must be among its holders; levels lost on the way shrink the chain."""

    def __init__(
        self,
        sequence: RunningSequence,
        limits: Limits,
        calls: StepCalls,
        outbound: Outbound,
        observer: Observer,
        *,
        clock: Callable[[], float],
        counts: TargetCounts | None = None,
    ) -> None:
        self.sequence = sequence
        self.counts = TargetCounts() if counts is None else counts
        self._limits = limits
        self._calls = calls
        self._outbound = outbound
        self._observer = observer
        self._clock = clock
        self._logprobs: tuple[Logprobs, ...] = ()  # of the target's last verdict

    async def prefill(self, target: str, drafters: Sequence[str]) -> Commit:
        """The target's first token; drafters prefill beside it and are not waited for. Every holder is opened."""
        for holder in self.sequence.holders.values():
            self._open(holder)
        for model in drafters:
            self._post_prefill(model)
        try:
            return self._commit(await self._verified(target, [], 0))
        except ReplicaLost as lost:
            raise TargetLost(lost.replica_id) from lost

    async def round(self, plan: Plan) -> Commit:
        """One round over `plan`, whose models must all be holders.

        A lower level that is lost is taken out of the holders and ends the round early: what is committed so far stays,
        and the tokens of the commit may be none. Raises TargetLost when the target is.
        """
        self.sequence.begin_round()
        try:
            return self._commit(await self._nested(plan))
        except ReplicaLost as lost:
            self.drop(lost.replica_id, plan.chain[-1])
            return Commit([], None)

    def drop(self, replica_id: str, target: str) -> None:
        """Forget a holder that is gone; TargetLost if it was the target's."""
        holders = self.sequence.holders
        if target not in holders or holders[target].replica_id == replica_id:
            raise TargetLost(replica_id)
        self.sequence.holders = {m: h for m, h in holders.items() if h.replica_id != replica_id}

    async def probe(self, model: str, count: int, stop_below: float) -> Probed | None:
        """The model's own samples at the last `count` committed positions; None if it is gone or silent."""
        s, committed_len = self.sequence, len(self.sequence.tokens)

        def make(holder: Holder) -> Step:
            start = min(holder.acked_len, committed_len)
            missing = tuple(s.tokens[start:committed_len])
            return Probe(s.seq, s.next_key(), committed_len, start, missing, count, stop_below, s.num_top)

        try:
            reply = await self._step(model, "probe", make)
        except ReplicaLost:
            return None
        return reply if isinstance(reply, Probed) else None

    # --------------------------------------------------------------------------------------------------- the round

    async def _nested(self, plan: Plan) -> list[int]:
        """Tokens of the target's verdict: accepted ones and its own."""
        chain, windows = plan.chain, plan.windows
        if len(chain) == 1:
            return await self._verified(chain[0], [], 0)
        held: list[list[int]] = [[] for _ in chain]
        origins: list[list[Origin]] = [[] for _ in chain]
        while True:
            draft = await self._drafts(plan, held)
            held[1] = draft.tokens
            level = 1
            while True:
                num_checked = len(held[level])
                verified = await self._verified(chain[level], held, level)
                num_accepted = len(verified) - 1
                if level == 1:
                    self._observe_draft(draft, chain[1], num_accepted)
                else:
                    lower, upper, held_origins = chain[level - 1], chain[level], tuple(origins[level])
                    self._observer.checked(CheckSeen(lower, upper, num_checked, num_accepted, 0, held_origins))
                if level == len(chain) - 1:
                    return verified
                below = draft.samplers if level == 1 else [chain[level - 1]] * num_checked
                held[level], origins[level] = [], []
                held[level + 1].extend(verified)
                origins[level + 1].extend(origins_of(below, num_accepted))
                if len(held[level + 1]) < windows[level] and self._worth_more(held, verified):
                    break
                level += 1

    def _worth_more(self, held: Sequence[Sequence[int]], newest: Sequence[int]) -> bool:
        """Whether tokens after those held could still be committed in this round."""
        return self._room(held) > 0 and not self._limits.stop_ids.intersection(newest)

    def _room(self, held: Sequence[Sequence[int]]) -> int:
        """How many more tokens may be drafted: the target adds one of its own to all that is held."""
        return self._limits.max_tokens - self.sequence.output_len - 1 - sum(map(len, held))

    async def _drafts(self, plan: Plan, held: Sequence[list[int]]) -> "_Draft":
        """By the first drafter, and by a tail where that one drafted all it was asked for."""
        parts = [(plan.chain[0], plan.windows[0], plan.stop_below)]
        if plan.tail is not None and plan.tail.model in self.sequence.holders:
            parts.append((plan.tail.model, plan.tail.window, plan.tail.stop_below))
        draft = _Draft([], [])
        for model, window, stop_below in parts:
            count = max(0, min(window, self._room(held) - len(draft.tokens)))
            tokens = await self._drafted(model, [*self._context(held, 1), *draft.tokens], count, stop_below)
            draft.tokens.extend(tokens)
            draft.parts.append((model, count, len(tokens)))
            if len(tokens) < window:
                break
        return draft

    async def _drafted(self, model: str, context: Sequence[int], count: int, stop_below: float) -> Sequence[int]:
        if count == 0:
            return ()
        reply = await self._step(model, "draft", lambda holder: self._draft(holder, context, count, stop_below))
        assert isinstance(reply, Drafted), reply
        self._observer.drafted(model, count, len(reply.tokens))
        return reply.tokens

    def _observe_draft(self, draft: "_Draft", checker: str, num_accepted: int) -> None:
        """A part says something where all before it was right."""
        for model, num_asked, num_drafted in draft.parts:
            accepted = min(num_accepted, num_drafted)
            self._observer.checked(CheckSeen(model, checker, num_drafted, accepted, num_asked))
            num_accepted -= num_drafted
            if num_accepted < 0:
                return

    async def _verified(self, model: str, held: Sequence[Sequence[int]], level: int) -> list[int]:
        """What `model` keeps of `held[level]`, and its own token."""
        checked = held[level] if held else []
        tokens = self._context(held, level)
        is_target = level == max(len(held) - 1, 0)
        logprobs = self.sequence.logprobs if is_target else -1
        num_top = self.sequence.num_top_of_check if is_target else 0
        make = partial(self._check, tokens=tokens, count=len(checked), logprobs=logprobs, num_top=num_top)
        reply = await self._step(model, "check", make, is_target)
        assert isinstance(reply, Verdict), reply
        if is_target:
            self.counts.add(len(checked), reply.num_accepted)
            self._logprobs = reply.logprobs
            self.sequence.keep_tops(reply.tops)
        return [*checked[: reply.num_accepted], reply.own_token]

    def _context(self, held: Sequence[Sequence[int]], level: int) -> list[int]:
        """Droppable tokens after the committed ones, outermost first, down to those that `level` checks."""
        return [token for tokens in reversed(held[level:]) for token in tokens]

    def _commit(self, verified: Sequence[int]) -> Commit:
        kept, reason = self._limits.cut(self.sequence.output_len, verified)
        self.sequence.tokens.extend(kept)
        return Commit(kept, reason, self._logprobs[: len(kept)])

    # ---------------------------------------------------------------------------------------------------- one step

    async def _step(
        self, model: str, kind: str, make: Callable[[Holder], Step], is_target: bool = False
    ) -> Step | object:
        """Send a step until it is answered; resend what the holder needs. ReplicaLost after too many tries."""
        holder = self.sequence.holders.get(model)
        if holder is None:
            raise ReplicaLost(model)
        attempts, most_behind = 0, MOST_PROBE_BEHIND if kind == "probe" else MOST_BEHIND
        while attempts < ATTEMPTS:
            self._open(holder)
            sent_s, step = self._clock(), make(holder)
            if step.from_len + len(step.tokens) - holder.kv_len > most_behind:
                kind = CATCH_UP
            reply = await self._calls.call(holder.replica_id, step)
            match reply:
                case None:
                    holder.opened = False
                    attempts += not is_target
                case Need(from_len=from_len, unknown=unknown):
                    holder.acked_len, holder.opened = from_len, not unknown
                    attempts += 1
                case Drafted() | Verdict() | Probed():
                    holder.acked_len, holder.kv_len = reply.committed_len, reply.kv_len
                    self._observer.timing(holder, kind, reply.timing, self._clock() - sent_s)
                    return reply
        raise ReplicaLost(holder.replica_id)

    def _open(self, holder: Holder) -> None:
        """The first message to a holder, and the one after it lost the sequence."""
        if not holder.opened:
            s = self.sequence
            message = Open(s.seq, tuple(s.tokens), s.prompt_len, s.sampling)
            holder.opened = self._outbound.to_replica(holder.replica_id, message)
            holder.acked_len = len(s.tokens)

    def _draft(self, holder: Holder, held: Sequence[int], count: int, stop_below: float = 0.0) -> Draft:
        s = self.sequence
        return Draft(s.seq, s.next_key(), len(s.tokens), holder.acked_len, self._from(holder, held), count, stop_below)

    def _check(self, holder: Holder, tokens: Sequence[int], count: int, logprobs: int, num_top: int) -> Check:
        s, given = self.sequence, self._from(holder, tokens)
        return Check(s.seq, s.next_key(), len(s.tokens), holder.acked_len, given, count, logprobs, num_top)

    def _from(self, holder: Holder, held: Sequence[int]) -> tuple[int, ...]:
        return (*self.sequence.tokens[holder.acked_len :], *held)

    def _post_prefill(self, model: str) -> None:
        holder = self.sequence.holders[model]
        self._open(holder)
        holder.is_reading = self._outbound.to_replica(holder.replica_id, self._draft(holder, (), 0))
