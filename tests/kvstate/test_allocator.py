from itertools import takewhile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstate.allocator import BlockAllocator, prefix_keys

NUM_BLOCKS, BLOCK_TOKENS = 12, 4
SEQ = st.integers(0, 4)
LENGTH = st.integers(0, NUM_BLOCKS * BLOCK_TOKENS + 9)
KEYS = st.lists(st.sampled_from([b"a", b"b", b"c", b"d", b"e"]), min_size=1, max_size=4, unique=True)


def test_blocks_cover_positions_and_are_the_lowest_free() -> None:
    allocator = BlockAllocator(num_blocks=8, block_tokens=4)
    assert allocator.extend(1, 5)
    assert allocator.extend(2, 4)
    assert allocator.extend(1, 9)
    assert list(allocator.blocks(1)) == [0, 1, 3]
    assert list(allocator.blocks(2)) == [2]
    assert (allocator.used_blocks, allocator.free_blocks) == (4, 4)
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


def test_keys_stand_for_all_tokens_before_them() -> None:
    keys = prefix_keys([1, 2, 3, 4, 5], 2)
    assert len(keys) == 2
    assert prefix_keys([1, 2, 3, 4], 2) == keys
    assert prefix_keys([1, 2, 9, 4], 2)[0] == keys[0]
    assert prefix_keys([9, 2, 3, 4], 2)[1] != keys[1]
    assert prefix_keys([1, 2], 2, salt=b"other")[0] != keys[0]
    assert prefix_keys([1], 2) == []


def test_an_adopted_block_is_free_only_after_its_last_holder() -> None:
    allocator = BlockAllocator(num_blocks=4, block_tokens=4)
    assert allocator.extend(1, 8)
    allocator.publish(1, [b"a"])
    assert allocator.adopt(2, [b"a", b"b"]) == 1
    assert allocator.extend(2, 8)
    assert list(allocator.blocks(2)) == [0, 2]
    assert allocator.used_blocks == 3
    allocator.release(1)
    assert allocator.used_blocks == 2
    allocator.release(2)
    assert allocator.free_blocks == 4
    assert allocator.adopt(3, [b"a"]) == 1
    assert list(allocator.blocks(3)) == [0]


def test_the_block_unused_for_longest_makes_room_and_of_a_text_the_last_first() -> None:
    allocator = BlockAllocator(num_blocks=5, block_tokens=1)
    for seq, keys in ((1, [b"a", b"ab"]), (2, [b"c", b"cd"])):
        assert allocator.extend(seq, 2)
        allocator.publish(seq, keys)
        allocator.release(seq)
    assert allocator.extend(9, 2)  # the block that was never used, then the older text's last one
    assert allocator.adopt(3, [b"a", b"ab"]) == 1
    assert allocator.adopt(4, [b"c", b"cd"]) == 2
    assert not allocator.extend(5, 1)
    allocator.release(3)
    allocator.release(4)
    assert allocator.extend(5, 3)
    assert allocator.adopt(6, [b"c"]) == 0


def test_a_key_is_published_once() -> None:
    allocator = BlockAllocator(num_blocks=4, block_tokens=4)
    for seq in (1, 2):
        assert allocator.extend(seq, 4)
        allocator.publish(seq, [b"a"])
    assert allocator.adopt(3, [b"a"]) == 1
    assert list(allocator.blocks(3)) == [0]
    allocator.release(2)
    assert allocator.extend(4, 12)
    assert list(allocator.blocks(4)) == [1, 2, 3]


class AllocatorMachine(RuleBasedStateMachine):
    """Against a model that keeps only block tables and recomputes who uses what."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS, BLOCK_TOKENS)
        self.tables: dict[int, list[int]] = {}
        self.published: dict[bytes, int] = {}

    def used(self) -> set[int]:
        return {block for table in self.tables.values() for block in table}

    @rule(seq=SEQ, num_tokens=LENGTH)
    def extend(self, seq: int, num_tokens: int) -> None:
        before = self.tables.get(seq, [])
        missing = max(0, (num_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS - len(before))
        free = sorted(set(range(NUM_BLOCKS)) - self.used())
        plain = [block for block in free if block not in self.published.values()]
        assert self.allocator.extend(seq, num_tokens) == (missing <= len(free))
        if missing <= len(free):
            taken = list(self.allocator.blocks(seq))[len(before) :]
            assert set(taken) <= set(free)
            assert taken[: len(plain)] == plain[:missing]
            self.tables[seq] = before + taken
            self.published = {key: block for key, block in self.published.items() if block not in taken}

    @rule(seq=SEQ, num_tokens=LENGTH)
    def truncate(self, seq: int, num_tokens: int) -> None:
        before = self.tables.get(seq, [])
        after = [block for i, block in enumerate(before) if i * BLOCK_TOKENS < num_tokens]
        assert self.allocator.truncate(seq, num_tokens) == len(before) - len(after)
        self.tables[seq] = after

    @rule(seq=SEQ, keys=KEYS)
    def publish(self, seq: int, keys: list[bytes]) -> None:
        self.allocator.publish(seq, keys)
        for key, block in zip(keys, self.tables.get(seq, []), strict=False):
            if key not in self.published and block not in self.published.values():
                self.published[key] = block

    @rule(seq=SEQ, keys=KEYS)
    def adopt(self, seq: int, keys: list[bytes]) -> None:
        if not self.tables.get(seq):
            wanted = [self.published[key] for key in takewhile(self.published.__contains__, keys)]
            assert self.allocator.adopt(seq, keys) == len(wanted)
            self.tables[seq] = wanted

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
