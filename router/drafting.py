"""Who drafts what the first checker gets: one model, a group of them, and a tail. Drafting may go on past the block.

A model alone drafts a block in one step. A group (router/fusion.py) keeps step: each position is one turn, in which
every member continues by one token; the fused token goes to all with the next turn. Who does not answer within a turn's
deadline is left out of the rest of the block, and of as many blocks as it was late before, doubled each time.

While a block is being checked, its drafters go on: under the guess that all of it will be accepted, first the checker's
own token, then the next block. If it comes so, that block is there already; else it is thrown away.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from kvstate.protocol import Drafted, StepReply
from router.checks import Observer
from router.fusion import Fused, fuse
from router.links import ReplicaLost
from router.plan import Plan, members_of
from router.steps import Steps

NUM_GUESSES = 2
"""Tokens that a drafter states for each position where others draft with it, or where they make a tree."""

MOST_SKIPPED = 64
"""Blocks for which a member that was late is left out, at most."""


@dataclass(slots=True)
class Made:
    """A draft.

    parts   (drafter or group, how many tokens it was asked for, how many it gave)
    fused   of the first tokens, as many as anything was stated for
    """

    tokens: list[int] = field(default_factory=list)
    parts: list[tuple[str, int, int]] = field(default_factory=list)
    fused: list[Fused] = field(default_factory=list)

    @property
    def samplers(self) -> list[str]:
        """Of each token."""
        return [model for model, _, num_drafted in self.parts for _ in range(num_drafted)]


@dataclass(slots=True)
class _Block:
    """Positions drafted in turns, up to `goal`, after the committed tokens and `context`.

    start_len      how many tokens were committed when it began
    num_committed  of its positions; more than none where it was begun before the check of what is in `context`
    """

    element: str
    start_len: int
    context: Sequence[int]
    goal: int
    stop_below: float
    positions: list[Fused] = field(default_factory=list)
    num_committed: int = 0

    @property
    def first(self) -> int:
        """Where its first position that is open stands in the text."""
        return self.start_len + len(self.context) + self.num_committed

    @property
    def open(self) -> list[Fused]:
        return self.positions[self.num_committed :]

    def held(self, committed_len: int) -> list[int]:
        """Droppable tokens after the committed ones."""
        return [*self.context, *(p.token for p in self.positions)][committed_len - self.start_len :]

    def wants(self, more: Fused) -> bool:
        """Whether the draft with one more position would be right often enough."""
        return prod(p.probability for p in self.open) * more.probability >= self.stop_below


class Drafters:
    """Of one sequence."""

    def __init__(self, steps: Steps, observer: Observer, stop_ids: frozenset[int]) -> None:
        self._steps = steps
        self._observer = observer
        self._stop_ids = stop_ids
        self._ahead: tuple[_Block, asyncio.Task[None]] | None = None
        self._late: dict[str, asyncio.Future[StepReply | None]] = {}
        self._skipped: dict[str, int] = {}  # blocks left out, by member that was late
        self._to_skip: dict[str, int] = {}

    async def draft(self, plan: Plan, context: Sequence[int], room: int) -> Made:
        """At most `room` tokens after committed ones and `context`: by the first of the chain, and by a tail where
        that one drafted all it was asked for.
        """
        made, element, count = Made(), plan.chain[0], min(plan.windows[0], room)
        names = self._present(element)
        block = await self._taken_over(element, context, count)
        if block is not None or len(names) > 1:
            block = block or self._block(element, context, count, plan.stop_below)
            await self._turns(block, names)
            made.fused = block.open[:room]
            made.tokens = [position.token for position in made.fused]
        elif names:
            await self._alone(made, names[0], context, count, plan.stop_below, NUM_GUESSES if plan.tree_nodes else 0)
        made.parts.append((element, max(count, len(made.tokens)), len(made.tokens)))
        await self._add_tail(made, plan, context, room)
        return made

    def go_on(self, plan: Plan, context: Sequence[int], most: int) -> None:
        """Draft up to `most` positions past `context`, which is being checked."""
        self.stop()
        names = self._present(plan.chain[0])
        if names and most > 0:
            block = self._block(plan.chain[0], context, most, 0.0)
            self._ahead = block, asyncio.create_task(self._turns(block, names))

    def settle(self, own_token: int | None) -> None:
        """The check's answer: its own token after all was accepted, None where not all was."""
        if self._ahead is None:
            return
        block, _ = self._ahead
        if own_token is not None and block.positions and block.positions[0].token == own_token:
            block.num_committed = 1
        else:
            self.stop()

    def stop(self) -> None:
        """Nobody wants what is drafted ahead."""
        if self._ahead is not None:
            self._ahead[1].cancel()
            self._ahead = None

    # ----------------------------------------------------------------------------------------------------- one block

    def _present(self, element: str) -> tuple[str, ...]:
        return tuple(name for name in members_of(element) if name in self._steps.sequence.holders)

    def _block(self, element: str, context: Sequence[int], goal: int, stop_below: float) -> _Block:
        return _Block(element, len(self._steps.sequence.tokens), context, goal, stop_below)

    async def _taken_over(self, element: str, context: Sequence[int], count: int) -> _Block | None:
        """The block that the same drafters drafted ahead at this place, with `count` positions if there are so many."""
        if self._ahead is None:
            return None
        (block, task), self._ahead = self._ahead, None
        if block.element != element or block.first != len(self._steps.sequence.tokens) + len(context):
            task.cancel()
            return None
        block.goal = block.num_committed + count
        try:
            await task
        finally:
            task.cancel()
        return block

    async def _add_tail(self, made: Made, plan: Plan, context: Sequence[int], room: int) -> None:
        tail = plan.tail
        if tail is None or len(made.tokens) < plan.windows[0] or tail.model not in self._steps.sequence.holders:
            return
        num_before, count = len(made.tokens), min(tail.window, room - len(made.tokens))
        await self._alone(made, tail.model, context, count, tail.stop_below, 0)
        made.parts.append((tail.model, count, len(made.tokens) - num_before))

    async def _alone(
        self, made: Made, model: str, context: Sequence[int], count: int, stop_below: float, num_guesses: int
    ) -> None:
        if count <= 0:
            return
        held = [*context, *made.tokens]
        reply = await self._steps.run(
            model, "draft", lambda holder: self._steps.draft(holder, held, count, stop_below, num_guesses)
        )
        assert isinstance(reply, Drafted), reply
        self._observer.drafted(model, count, len(reply.tokens))
        made.tokens.extend(reply.tokens)
        made.fused.extend(fuse({model: stated}, self._observer.trust) for stated in reply.guesses)

    # ----------------------------------------------------------------------------------------------------- in turns

    async def _turns(self, block: _Block, names: Sequence[str]) -> None:
        """Up to the block's goal; less where nobody has a guess, or one that ends the text."""
        names = self._punctual(names)
        while len(block.positions) < block.goal and names and not self._has_ended(block):
            replies = await self._turn(names, block)
            stated = {name: reply.guesses[0] for name, reply in replies.items() if reply.guesses}
            if not stated:
                return
            fused = fuse(stated, self._observer.trust)
            if not block.wants(fused):
                return
            block.positions.append(fused)
            names = [name for name in names if name in replies]

    def _has_ended(self, block: _Block) -> bool:
        return bool(block.positions) and block.positions[-1].token in self._stop_ids

    async def _turn(self, names: Sequence[str], block: _Block) -> dict[str, Drafted]:
        """One position: the replies that came in time, or if none did, the first. Members that are lost or did not do
        the step are left out.
        """
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        asked = self._asked(names, block)
        try:
            done = await self._answers(asked)
        except asyncio.CancelledError:
            for future in asked.values():
                future.cancel()
            raise
        for name, future in asked.items():
            self._look_after(name, future)
        if done:
            self._observer.turn(tuple(done), loop.time() - started_s)
        for name, reply in done.items():
            self._observer.drafted(name, 1, len(reply.tokens))
        return done

    async def _answers(self, asked: "dict[str, asyncio.Future[StepReply | None]]") -> dict[str, Drafted]:
        if asked:
            await asyncio.wait(asked.values(), timeout=self._observer.turn_deadline_s(tuple(asked)))
        while not (done := _answered(asked)) and (left := [f for f in asked.values() if not f.done()]):
            await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)  # each ends with its step, at the latest
        return done

    def _asked(self, names: Sequence[str], block: _Block) -> dict[str, asyncio.Future[StepReply | None]]:
        held = block.held(len(self._steps.sequence.tokens))
        asked = {}
        for name in names:
            if name in self._steps.sequence.holders:
                asked[name] = self._steps.start(
                    name, "draft", lambda holder: self._steps.draft(holder, held, 1, 0.0, NUM_GUESSES)
                )
        return asked

    def _look_after(self, name: str, future: "asyncio.Future[StepReply | None]") -> None:
        """A member that is late is waited for no longer, but what its reply tells is still heard."""
        if not future.done():
            self._late[name] = future
            future.add_done_callback(_heard)
            self._skipped[name] = self._to_skip[name] = min(MOST_SKIPPED, 2 * self._skipped.get(name, 0) or 1)
        elif isinstance(lost := future.exception(), ReplicaLost):
            self._steps.sequence.forget(lost.replica_id)
        else:
            self._skipped.pop(name, None)

    def _punctual(self, names: Sequence[str]) -> list[str]:
        """Without those that are left out of this block for having been late; all where none would be left."""
        skipped = {name for name in names if self._to_skip.get(name, 0) > 0}
        for name in skipped:
            self._to_skip[name] -= 1
        chosen = [name for name in names if name not in skipped] or list(names)
        for name in chosen:
            if (late := self._late.pop(name, None)) is not None:
                late.cancel()  # the next step of this member replaces it
        return chosen


def _heard(late: "asyncio.Future[StepReply | None]") -> None:
    """Nobody waits for it: that its replica was lost is told by the next step there."""
    if not late.cancelled():
        late.exception()


def _answered(asked: dict[str, asyncio.Future[StepReply | None]]) -> dict[str, Drafted]:
    found = {}
    for name, future in asked.items():
        if future.done() and future.exception() is None and isinstance(reply := future.result(), Drafted):
            found[name] = reply
    return found
