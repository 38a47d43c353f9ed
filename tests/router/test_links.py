"""Waiting for replies to steps: answers, silence, losses."""

import asyncio

import pytest

from kvstate.protocol import Draft, Drafted, Key, Message, Timing
from router.links import ReplicaLost, StepCalls

SHORT_S, LONG_S = 0.02, 60.0


class Sent:
    """An outbound that keeps what is sent; `is_open` False refuses it."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Message]] = []
        self.is_open = True

    def to_replica(self, replica_id: str, message: Message) -> bool:
        self.messages.append((replica_id, message))
        return self.is_open

    def to_coordinator(self, message: Message) -> bool:
        raise AssertionError(message)

    def to_ingress(self, ingress_id: str, message: Message) -> bool:
        raise AssertionError(message)


def draft(step: int) -> Draft:
    return Draft(1, Key(1, step), 4, 4, (), 2)


def reply(step: int) -> Drafted:
    return Drafted(1, Key(1, step), (7, 8), 4, 6, Timing())


async def test_a_reply_is_matched_by_sequence_and_key() -> None:
    calls = StepCalls(Sent(), LONG_S)
    first, second = (asyncio.create_task(calls.call("r", draft(step))) for step in (1, 2))
    await asyncio.sleep(0)
    calls.resolve(reply(2))
    calls.resolve(reply(2))
    calls.resolve(reply(3))
    assert await second == reply(2)
    assert not first.done()
    calls.resolve(reply(1))
    assert await first == reply(1)


async def test_each_unanswered_step_ends_with_none() -> None:
    calls = StepCalls(Sent(), SHORT_S)
    first = asyncio.create_task(calls.call("r", draft(1)))
    others = [asyncio.create_task(calls.call("r", draft(step))) for step in (2, 3)]
    await asyncio.sleep(0)
    calls.resolve(reply(3))
    assert await asyncio.gather(first, *others) == [None, None, reply(3)]
    calls.resolve(reply(1))
    assert await calls.call("r", draft(4)) is None, "the timer starts again after a pause"


async def test_a_cancelled_step_leaves_the_others_waiting() -> None:
    calls = StepCalls(Sent(), SHORT_S)
    first, second = (asyncio.create_task(calls.call("r", draft(step))) for step in (1, 2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second is None
    assert first.cancelled()


async def test_a_lost_replica_ends_its_own_steps_only() -> None:
    calls = StepCalls(Sent(), LONG_S)
    lost, kept = (asyncio.create_task(calls.call(name, draft(step))) for step, name in ((1, "a"), (2, "b")))
    await asyncio.sleep(0)
    calls.fail("a")
    with pytest.raises(ReplicaLost):
        await lost
    calls.resolve(reply(2))
    assert await kept == reply(2)


async def test_a_step_that_cannot_be_sent_is_a_lost_replica() -> None:
    sent = Sent()
    sent.is_open = False
    with pytest.raises(ReplicaLost):
        await StepCalls(sent, LONG_S).call("r", draft(1))
