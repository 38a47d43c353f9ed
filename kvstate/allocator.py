"""Which KV blocks belong to which sequence on one replica. Pure: tensors live in `models/`.

A block is room for `block_tokens` consecutive positions; position p of a sequence lives in block
`blocks(seq)[p // block_tokens]`. It is counted how many sequences refer to a block, so that full blocks of a common
prefix can be shared; a shared block must be full, because nobody may write into it.
"""

import heapq
from collections.abc import Sequence


class BlockAllocator:
    """Block tables of all sequences over `num_blocks` blocks of `block_tokens` positions; the lowest free ids first."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._free = list(range(num_blocks))  # a heap
        self._references = [0] * num_blocks
        self._tables: dict[int, list[int]] = {}

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks that some sequence refers to, shared ones counted once."""
        return self.num_blocks - len(self._free)

    @property
    def used_tokens(self) -> int:
        """Positions that the used blocks have room for."""
        return self.used_blocks * self.block_tokens

    @property
    def total_tokens(self) -> int:
        return self.num_blocks * self.block_tokens

    def blocks(self, seq: int) -> Sequence[int]:
        """The block table of `seq`, empty when it has none: a view that must not be changed or kept."""
        return self._tables.get(seq, ())

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def extend(self, seq: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` positions in all. False when too few blocks are free: then nothing changes."""
        missing = self.blocks_for(num_tokens) - len(self.blocks(seq))
        if missing > len(self._free):
            return False
        if missing > 0:
            self._tables.setdefault(seq, []).extend(self._take() for _ in range(missing))
        return True

    def share(self, seq: int, block_ids: Sequence[int]) -> None:
        """Begin `seq`, which must have no blocks, with full blocks that other sequences hold."""
        assert not self.blocks(seq), f"sequence {seq} has blocks already"
        assert all(self._references[block] for block in block_ids), f"free blocks among {block_ids}"
        for block in block_ids:
            self._references[block] += 1
        if block_ids:
            self._tables[seq] = list(block_ids)

    def truncate(self, seq: int, num_tokens: int) -> int:
        """Give back the whole blocks past `num_tokens` positions; returns how many. O(blocks given back)."""
        keep = self.blocks_for(num_tokens)
        if len(self.blocks(seq)) <= keep:
            return 0
        table = self._tables[seq]
        dropped = table[keep:]
        del table[keep:]
        for block in dropped:
            self._drop(block)
        if not table:
            del self._tables[seq]
        return len(dropped)

    def release(self, seq: int) -> int:
        """Give back all blocks of `seq`; returns how many. Nothing when it has none."""
        return self.truncate(seq, 0)

    def check_integrity(self) -> None:
        """Every block is either free or referred to as often as counted. O(blocks)."""
        counted = [0] * self.num_blocks
        for seq, table in self._tables.items():
            assert table, f"sequence {seq} has an empty table"
            assert len(set(table)) == len(table), f"sequence {seq} has a block twice: {table}"
            for block in table:
                counted[block] += 1
        assert counted == self._references
        assert sorted(self._free) == [block for block, count in enumerate(counted) if count == 0]

    def _take(self) -> int:
        block = heapq.heappop(self._free)
        self._references[block] += 1
        return block

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            heapq.heappush(self._free, block)
