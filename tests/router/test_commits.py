"""What the coordinator is told of commits, on a virtual clock."""

import asyncio

from benchmarks.simulation.clock import run
from kvstate.protocol import Committed, Message
from router.commits import GATHER_S, Commits


class Sent:
    """An outbound that keeps what the coordinator is told, and when."""

    def __init__(self) -> None:
        self.messages: list[tuple[float, Message]] = []

    def to_coordinator(self, message: Message) -> bool:
        self.messages.append((asyncio.get_running_loop().time(), message))
        return True

    def to_replica(self, replica_id: str, message: Message) -> bool:
        raise AssertionError(message)

    to_ingress = to_replica


def test_rounds_that_follow_closely_go_as_one_message_of_each_sequence_at_one_time() -> None:
    async def rounds() -> Sent:
        sent = Sent()
        commits = Commits(sent)
        for epoch in range(1, 201):  # 1 s
            commits.add(1, epoch, 2 + epoch, (epoch,))
            commits.add(2, epoch, 10 + 2 * epoch, (7, 8))
            await asyncio.sleep(0.005)
        await asyncio.sleep(GATHER_S)
        return sent

    sent = run(rounds())
    assert len(sent.messages) <= 2 * 20
    assert {at for at, _ in sent.messages[::2]} == {at for at, _ in sent.messages[1::2]}
    for seq, first_len, per_round in ((1, 3, 1), (2, 12, 2)):
        told = [m for _, m in sent.messages if isinstance(m, Committed) and m.seq == seq]
        lens = [(m.from_len, m.from_len + len(m.tokens)) for m in told]
        assert [first_len, *(end for _, end in lens)] == [*(start for start, _ in lens), first_len + 200 * per_round]
        assert [(end - first_len) // per_round for _, end in lens] == [m.epoch for m in told]


def test_none_waits_longer_than_it_may_and_nothing_is_sent_where_nothing_was_committed() -> None:
    async def rounds() -> Sent:
        sent = Sent()
        commits = Commits(sent)
        commits.add(1, 1, 3, (10, 11))
        await asyncio.sleep(10.0)
        commits.add(1, 2, 5, (12,))
        await asyncio.sleep(10.0)
        return sent

    first, second = Committed(1, 1, 3, (10, 11)), Committed(1, 2, 5, (12,))
    assert run(rounds()).messages == [(GATHER_S, first), (10.0 + GATHER_S, second)]


def test_a_sequence_that_ended_is_not_told_of_and_others_are() -> None:
    async def rounds() -> Sent:
        sent = Sent()
        commits = Commits(sent)
        commits.add(1, 1, 3, (10,))
        commits.add(2, 1, 3, (20,))
        commits.forget(1)
        commits.forget(3)
        commits.add(1, 5, 9, (30,))  # resumed meanwhile: what it lacks was told otherwise
        await asyncio.sleep(1.0)
        return sent

    assert [m for _, m in run(rounds()).messages] == [Committed(2, 1, 3, (20,)), Committed(1, 5, 9, (30,))]
