from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstate.allocator import BlockAllocator

NUM_BLOCKS, BLOCK_TOKENS = 12, 4
SEQ = st.integers(0, 4)
LENGTH = st.integers(0, NUM_BLOCKS * BLOCK_TOKENS + 9)


def test_blocks_cover_positions_and_are_the_lowest_free() -> None:
    allocator = BlockAllocator(num_blocks=8, block_tokens=4)
    assert allocator.extend(1, 5)
    assert allocator.extend(2, 4)
    assert allocator.extend(1, 9)
    assert list(allocator.blocks(1)) == [0, 1, 3]
    assert list(allocator.blocks(2)) == [2]
    assert (allocator.used_blocks, allocator.free_blocks, allocator.used_tokens) == (4, 4, 16)
    assert allocator.release(1) == 3
    assert allocator.extend(3, 16)
    assert list(allocator.blocks(3)) == [0, 1, 3, 4]


def test_a_partly_filled_block_survives_truncation() -> None:
    allocator = BlockAllocator(num_blocks=4, block_tokens=4)
    assert allocator.extend(1, 12)
    assert allocator.truncate(1, 5) == 1
    assert len(allocator.blocks(1)) == 2
    assert allocator.truncate(1, 8) == 0
    assert allocator.truncate(1, 4) == 1


def test_extend_without_room_changes_nothing() -> None:
    allocator = BlockAllocator(num_blocks=3, block_tokens=4)
    assert allocator.extend(1, 8)
    assert not allocator.extend(1, 13)
    assert not allocator.extend(2, 5)
    assert list(allocator.blocks(1)) == [0, 1]
    assert list(allocator.blocks(2)) == []
    assert allocator.free_blocks == 1
    assert allocator.extend(2, 4)


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    allocator = BlockAllocator(num_blocks=4, block_tokens=4)
    assert allocator.extend(1, 8)
    allocator.share(2, allocator.blocks(1)[:1])
    assert allocator.extend(2, 8)
    assert list(allocator.blocks(2)) == [0, 2]
    assert allocator.used_blocks == 3
    allocator.release(1)
    assert allocator.used_blocks == 2
    allocator.release(2)
    assert allocator.free_blocks == 4


class AllocatorMachine(RuleBasedStateMachine):
    """Against a model that keeps only block tables and recomputes who uses what."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS, BLOCK_TOKENS)
        self.tables: dict[int, list[int]] = {}

    def used(self) -> set[int]:
        return {block for table in self.tables.values() for block in table}

    @rule(seq=SEQ, num_tokens=LENGTH)
    def extend(self, seq: int, num_tokens: int) -> None:
        before = self.tables.get(seq, [])
        missing = max(0, (num_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS - len(before))
        free = sorted(set(range(NUM_BLOCKS)) - self.used())
        assert self.allocator.extend(seq, num_tokens) == (missing <= len(free))
        if missing <= len(free):
            self.tables[seq] = before + free[:missing]

    @rule(seq=SEQ, num_tokens=LENGTH)
    def truncate(self, seq: int, num_tokens: int) -> None:
        before = self.tables.get(seq, [])
        after = [block for i, block in enumerate(before) if i * BLOCK_TOKENS < num_tokens]
        assert self.allocator.truncate(seq, num_tokens) == len(before) - len(after)
        self.tables[seq] = after

    @rule(seq=SEQ, source=SEQ, count=st.integers(1, 4))
    def share(self, seq: int, source: int, count: int) -> None:
        if seq != source and not self.tables.get(seq):
            self.allocator.share(seq, self.tables.get(source, [])[:count])
            self.tables[seq] = self.tables.get(source, [])[:count]

    @rule(seq=SEQ)
    def release(self, seq: int) -> None:
        assert self.allocator.release(seq) == len(self.tables.pop(seq, []))

    @invariant()
    def equals_the_model(self) -> None:
        self.allocator.check_integrity()
        for seq in range(5):
            assert list(self.allocator.blocks(seq)) == self.tables.get(seq, [])
        assert self.allocator.used_blocks == len(self.used())
        assert self.allocator.free_blocks + self.allocator.used_blocks == NUM_BLOCKS


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
