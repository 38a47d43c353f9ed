import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.ledger import Ledger, Running
from kvstate.protocol import Profile, ReplicaInfo
from kvstate.sequence import ConflictingCommit


def info(replica_id: str, model: str = "target", num_blocks: int = 10, context_len: int = 1000) -> ReplicaInfo:
    return ReplicaInfo(replica_id, model, "node", "host:1", "bytes", context_len, 4, num_blocks, Profile(1.0))


def ledger_with(*infos: ReplicaInfo) -> Ledger:
    ledger = Ledger(resend_s=0.1)
    for each in infos:
        ledger.register(each, each.num_blocks, now=0.0)
    return ledger


def test_room_is_what_is_neither_promised_nor_in_use() -> None:
    ledger = ledger_with(info("a"))
    replica = ledger.replicas["a"]
    ledger.attach(ledger.start(1, "r", 16, 0), "target", "a", 0, now=0.0)
    assert replica.reserved == {1: 5}  # ceil(16 / 4) and one to spare
    assert replica.room_blocks == 5
    replica.free_blocks = 3  # somebody else uses seven
    assert replica.room_blocks == 3
    assert replica.has_room(8)
    assert not replica.has_room(9)


def test_the_spare_block_is_not_asked_of_a_replica_that_has_none() -> None:
    ledger = ledger_with(info("a", num_blocks=10, context_len=41))
    assert ledger.replicas["a"].blocks_for(40) == 10
    assert ledger.replicas["a"].blocks_for(41) is None
    assert not ledger.never_fits("target", 40)
    assert ledger.never_fits("target", 41)
    assert not ledger.never_fits("drafter", 41)  # nobody known: it may come


def test_the_replica_with_most_room_is_best_and_lost_ones_are_not() -> None:
    ledger = ledger_with(info("small", num_blocks=6), info("large", num_blocks=9))
    best = ledger.best_replica("target", 16)
    assert best is ledger.replicas["large"]
    assert ledger.best_replica("target", 16, ("gone", "small", "large")) is ledger.replicas["small"]
    assert ledger.best_replica("target", 30, ("small",)) is ledger.replicas["large"]  # the small one has no room
    ledger.lose("large")
    assert ledger.best_replica("target", 16) is ledger.replicas["small"]
    assert ledger.best_replica("target", 24) is ledger.replicas["small"]
    assert ledger.best_replica("target", 25) is None
    assert not ledger.never_fits("target", 25)  # the large one may come back
    ledger.forget_lost(before_s=1.0)
    assert ledger.never_fits("target", 25)


def test_a_closed_sequence_keeps_its_promise_until_released_and_its_id_for_good() -> None:
    ledger = ledger_with(info("a"))
    ledger.attach(ledger.start(1, "r", 16, 0), "target", "a", 0, now=0.0)
    ledger.replicas["a"].free_blocks = 6
    ledger.close(1, now=5.0)
    ledger.check_integrity()
    assert ledger.is_closed(1)
    assert ledger.replicas["a"].room_blocks == 5
    ledger.release(ledger.replicas["a"], 1)
    assert ledger.replicas["a"].room_blocks == 10
    ledger.release(ledger.replicas["a"], 1)  # said twice
    ledger.check_integrity()


def test_tombstones_are_bounded() -> None:
    ledger = Ledger(resend_s=0.1, num_tombstones=3)
    for seq in range(5):
        ledger.close(seq, now=0.0)
    assert [ledger.is_closed(seq) for seq in range(5)] == [False, False, True, True, True]
    ledger.check_integrity()


def test_lag_counts_what_is_committed_and_not_acknowledged() -> None:
    ledger = ledger_with(info("a"))
    entry = ledger.start(1, "r", 16, start_len=3)
    ledger.attach(entry, "target", "a", 3, now=1.0)
    assert [lag.behind_tokens for lag in ledger.lags(now=2.0)] == [0]
    entry.record(1, 3, [7, 8])
    entry.holders["target"].acked_len = 4
    (lag,) = ledger.lags(now=2.5)
    assert (lag.model, lag.committed_len, lag.acked_len, lag.behind_tokens, lag.waiting_s) == ("target", 5, 4, 1, 1.5)


def test_a_promise_without_a_holder_is_found() -> None:
    ledger = ledger_with(info("a"))
    ledger.replicas["a"].reserved[5] = 2
    with pytest.raises(AssertionError):
        ledger.check_integrity()


def test_a_commit_that_contradicts_an_earlier_one_is_refused() -> None:
    entry = Running(1, "r", 100, start_len=3)
    entry.record(1, 3, [7, 8])
    with pytest.raises(ConflictingCommit, match="position 4 is committed as 8, not 9"):
        entry.record(2, 4, [9, 9])
    assert (entry.tokens, entry.epoch) == ([7, 8], 1)


TEXT = list(range(100, 120))


@given(
    start_len=st.integers(0, 5),
    pieces=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 5)), max_size=12),
)
def test_recorded_tokens_are_those_that_touch_what_is_known(start_len: int, pieces: list[tuple[int, int]]) -> None:
    """Against sets of positions: what touches or overlaps is joined, what lies beyond a hole starts anew."""
    entry = Running(1, "r", 100, start_len=start_len)
    known: set[int] = set()
    low = high = start_len
    for from_len, count in pieces:
        entry.record(1, from_len, TEXT[from_len : from_len + count])
        new = set(range(from_len, from_len + count))
        if new and from_len > high:
            known = new
        elif new and from_len + count >= low:
            known |= new
        if known:
            low, high = min(known), max(known) + 1
        assert (entry.start_len, entry.committed_len) == (low, high)
        assert entry.tokens == [TEXT[position] for position in sorted(known)]
