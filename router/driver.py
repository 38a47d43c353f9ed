"""One request's rounds: draft, check level by level, commit the target's verdict, again.

The nested rule: level 1 drafts windows[0] tokens (router/drafting.py); as soon as a level has delivered at least
windows[i] tokens, the next one checks all of them, keeps what equals its samples and adds its own token; up to the
target. A round lives on one stack of `held` tokens: `held[i]` waits for the check by chain[i]. A check empties its
entry, and whenever chain[i] checks, all entries below are empty; so the context of any step is committed + held[top] +
… + held[i].

Nothing here knows Ray, sockets or tensors: steps go through router/steps.py, plans come from a callable.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvstate.protocol import FinishReason, Logprobs, Probe, Probed, Step, Verdict
from router.checks import CheckSeen, Observer, Origin, ProposalsSeen, origins_of
from router.drafting import Drafters, Made
from router.links import Outbound, ReplicaLost, StepCalls
from router.plan import Plan
from router.sequence import Holder, Limits, RunningSequence, TargetCounts
from router.steps import Steps
from router.trees import TokenTree, grow


class TargetLost(Exception):
    """The target's replica is gone: the sequence must be rebuilt on another."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Newly committed output tokens of one round, cut where the request ends."""

    tokens: list[int]
    finish_reason: FinishReason | None
    logprobs: tuple[Logprobs, ...] = ()


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
        self._observer = observer
        self._steps = Steps(sequence, calls, outbound, observer, clock)
        self._drafters = Drafters(self._steps, observer, limits.stop_ids)
        self._logprobs: tuple[Logprobs, ...] = ()  # of the target's last verdict

    async def prefill(self, target: str, drafters: Sequence[str]) -> Commit:
        """The target's first token; drafters prefill beside it and are not waited for. Every holder is opened."""
        for holder in self.sequence.holders.values():
            self._steps.open(holder)
        for model in drafters:
            self._steps.post_prefill(model)
        try:
            return self._commit((await self._verified(target, [], 0))[0])
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
            self._drafters.stop()
            self.drop(lost.replica_id, plan.chain[-1])
            return Commit([], None)

    def drop(self, replica_id: str, target: str) -> None:
        """Forget a holder that is gone; TargetLost if it was the target's."""
        holders = self.sequence.holders
        if target not in holders or holders[target].replica_id == replica_id:
            raise TargetLost(replica_id)
        self.sequence.forget(replica_id)

    def stop(self) -> None:
        """No further round comes."""
        self._drafters.stop()

    async def probe(self, model: str, count: int, stop_below: float) -> Probed | None:
        """The model's own samples at the last `count` committed positions; None if it is gone or silent."""
        s, committed_len = self.sequence, len(self.sequence.tokens)

        def make(holder: Holder) -> Step:
            start = min(holder.acked_len, committed_len)
            missing = tuple(s.tokens[start:committed_len])
            return Probe(s.seq, s.next_key(), committed_len, start, missing, count, stop_below, s.num_top)

        try:
            reply = await self._steps.run(model, "probe", make)
        except ReplicaLost:
            return None
        return reply if isinstance(reply, Probed) else None

    # --------------------------------------------------------------------------------------------------- the round

    async def _nested(self, plan: Plan) -> list[int]:
        """Tokens of the target's verdict: accepted ones and its own."""
        chain, windows = plan.chain, plan.windows
        if len(chain) == 1:
            self._drafters.stop()
            return (await self._verified(chain[0], [], 0))[0]
        held: list[list[int]] = [[] for _ in chain]
        origins: list[list[Origin]] = [[] for _ in chain]
        while True:
            draft = await self._drafters.draft(plan, self._context(held, 1), self._room(held))
            held[1] = draft.tokens
            level = 1
            while True:
                num_checked = len(held[level])
                if plan.goes_on:
                    self._go_on(plan, held)
                tree = self._grown(plan, draft) if level == 1 and plan.tree_nodes else None
                verified, on_draft = await self._verified(chain[level], held, level, tree)
                num_accepted = len(verified) - 1
                if level == 1:
                    self._drafters.settle(verified[-1] if on_draft == num_checked else None)
                    self._observe_draft(draft, chain[1], on_draft)
                    self._observe_proposals(draft, chain[1], verified[: on_draft + 1])
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

    def _go_on(self, plan: Plan, held: Sequence[Sequence[int]]) -> None:
        """Past the whole draft, unless it ends the text; one position more than a block: the target's own token."""
        assert len(plan.chain) == 2, "only a draft that is checked by the target is known to be the text"
        if self._worth_more(held, held[1]):
            self._drafters.go_on(plan, self._context(held, 1), min(plan.windows[0] + 1, self._room(held)))

    def _worth_more(self, held: Sequence[Sequence[int]], newest: Sequence[int]) -> bool:
        """Whether tokens after those held could still be committed in this round."""
        return self._room(held) > 0 and not self._limits.stop_ids.intersection(newest)

    def _room(self, held: Sequence[Sequence[int]]) -> int:
        """How many more tokens may be drafted: the target adds one of its own to all that is held."""
        return self._limits.max_tokens - self.sequence.output_len - 1 - sum(map(len, held))

    def _observe_draft(self, made: Made, checker: str, num_accepted: int) -> None:
        """A part says something where all before it was right."""
        for model, num_asked, num_drafted in made.parts:
            if num_accepted < 0:
                return
            if num_asked:
                accepted = min(num_accepted, num_drafted)
                self._observer.checked(CheckSeen(model, checker, num_drafted, accepted, num_asked))
            num_accepted -= num_drafted

    def _observe_proposals(self, made: Made, checker: str, verified: Sequence[int]) -> None:
        """At positions up to the first that was not accepted, drafters proposed in a context that is the text's."""
        seen = list(zip(made.fused, verified, strict=False))
        if seen:
            fused, truth = zip(*seen, strict=True)
            self._observer.proposed(ProposalsSeen(checker, fused, truth))

    def _grown(self, plan: Plan, made: Made) -> TokenTree | None:
        """None where there is nothing to check beside the draft."""
        assert len(plan.chain) == 2, "only the last level checks trees"
        trust = self._observer.beside_trust()
        tree = grow(made.tokens, made.fused, plan.stop_below, plan.tree_nodes, trust)
        return tree if tree.parents else None

    async def _verified(
        self, model: str, held: Sequence[Sequence[int]], level: int, tree: TokenTree | None = None
    ) -> tuple[list[int], int]:
        """What `model` keeps of `held[level]`, or of a tree that grew from it, and its own token; how many it kept of
        `held[level]`.
        """
        checked = (held[level] if held else []) if tree is None else tree.tokens
        tokens = [*(self._context(held, level + 1) if held else ()), *checked]
        is_target = level == max(len(held) - 1, 0)
        logprobs = self.sequence.logprobs if is_target else -1
        num_top = self.sequence.num_top_of_check if is_target else 0
        make = partial(
            self._steps.check,
            tokens=tokens,
            count=len(checked),
            logprobs=logprobs,
            num_top=num_top,
            parents=() if tree is None else tree.parents,
        )
        reply = await self._steps.run(model, "check", make, is_target)
        assert isinstance(reply, Verdict), reply
        if is_target:
            self.counts.add(len(checked), reply.num_accepted)
            self._logprobs = reply.logprobs
            self.sequence.keep_tops(reply.tops)
        path = range(reply.num_accepted) if tree is None else reply.path
        on_draft = reply.num_accepted if tree is None else tree.on_draft(path)
        return [*(checked[node] for node in path), reply.own_token], on_draft

    def _context(self, held: Sequence[Sequence[int]], level: int) -> list[int]:
        """Droppable tokens after the committed ones, outermost first, down to those that `level` checks."""
        return [token for tokens in reversed(held[level:]) for token in tokens]

    def _commit(self, verified: Sequence[int]) -> Commit:
        kept, reason = self._limits.cut(self.sequence.output_len, verified)
        self.sequence.tokens.extend(kept)
        return Commit(kept, reason, self._logprobs[: len(kept)])
