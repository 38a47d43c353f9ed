"""Which KV blocks belong to which sequence on one replica. Pure: tensors live in `models/`.

A block is room for `block_tokens` consecutive positions; position p of a sequence lives in block
`blocks(seq)[p // block_tokens]`.

The prefix cache: a full block that nobody will write into again can be *published* under a key that stands for all
tokens up to its end (`prefix_keys`). A sequence that begins with those tokens *adopts* it. It is counted how many
sequences refer to a block; a published one that none refers to stays, until its room is needed: the one unused for
longest goes first, of one sequence the last before the first.
"""

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile


def prefix_keys(tokens: Sequence[int], block_tokens: int, salt: bytes = b"") -> list[bytes]:
    """A key for each full block of `tokens`: it depends on all tokens from the first on. `salt` keeps caches apart."""
    keys, key = list[bytes](), salt
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        key = hashlib.blake2b(key + array("q", tokens[end - block_tokens : end]).tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys


class BlockAllocator:
    """Block tables of all sequences over `num_blocks` blocks of `block_tokens` positions; the lowest free ids first."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._free = list(range(num_blocks))  # a heap
        self._references = [0] * num_blocks
        self._tables: dict[int, list[int]] = {}
        self._published: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}  # of published blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, without references; oldest first

    @property
    def free_blocks(self) -> int:
        """Blocks that `extend` can take, idle ones of the prefix cache included."""
        return len(self._free) + len(self._idle)

    @property
    def used_blocks(self) -> int:
        """Blocks that some sequence refers to, shared ones counted once."""
        return self.num_blocks - self.free_blocks

    def blocks(self, seq: int) -> Sequence[int]:
        """The block table of `seq`, empty when it has none: a view that must not be changed or kept."""
        return self._tables.get(seq, ())

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def extend(self, seq: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` positions in all. False when too few blocks are free: then nothing changes."""
        missing = self.blocks_for(num_tokens) - len(self.blocks(seq))
        if missing > self.free_blocks:
            return False
        if missing > 0:
            self._tables.setdefault(seq, []).extend(self._take() for _ in range(missing))
        return True

    def publish(self, seq: int, keys: Sequence[bytes]) -> None:
        """Let others adopt the first blocks of `seq`, one per key. Nobody may write into them from now on."""
        for key, block in zip(keys, self.blocks(seq), strict=False):
            if key not in self._published and block not in self._keys:
                self._published[key], self._keys[block] = block, key

    def adopt(self, seq: int, keys: Sequence[bytes]) -> int:
        """Begin `seq`, which must have no blocks, with the published blocks of the first keys; returns how many."""
        assert not self.blocks(seq), f"sequence {seq} has blocks already"
        found = [self._published[key] for key in takewhile(self._published.__contains__, keys)]
        for block in found:
            self._idle.pop(block, None)
            self._references[block] += 1
        if found:
            self._tables[seq] = found
        return len(found)

    def truncate(self, seq: int, num_tokens: int) -> int:
        """Give back the whole blocks past `num_tokens` positions; returns how many. O(blocks given back)."""
        keep = self.blocks_for(num_tokens)
        if len(self.blocks(seq)) <= keep:
            return 0
        table = self._tables[seq]
        dropped = table[keep:]
        del table[keep:]
        for block in reversed(dropped):
            self._drop(block)
        if not table:
            del self._tables[seq]
        return len(dropped)

    def release(self, seq: int) -> int:
        """Give back all blocks of `seq`; returns how many. Nothing when it has none."""
        return self.truncate(seq, 0)

    def check_integrity(self) -> None:
        """Every block is free, idle in the prefix cache, or referred to as often as counted. O(blocks)."""
        counted = [0] * self.num_blocks
        for seq, table in self._tables.items():
            assert table, f"sequence {seq} has an empty table"
            assert len(set(table)) == len(table), f"sequence {seq} has a block twice: {table}"
            for block in table:
                counted[block] += 1
        assert counted == self._references
        unused = {block for block, count in enumerate(counted) if count == 0}
        assert sorted(self._free) == sorted(unused - self._keys.keys())
        assert self._idle.keys() == unused & self._keys.keys()
        assert {block: key for key, block in self._published.items()} == self._keys

    def _take(self) -> int:
        block = heapq.heappop(self._free) if self._free else self._evict()
        self._references[block] += 1
        return block

    def _evict(self) -> int:
        """The idle block unused for longest; its key is forgotten."""
        block, _ = self._idle.popitem(last=False)
        del self._published[self._keys.pop(block)]
        return block

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] > 0:
            return
        if block in self._keys:
            self._idle[block] = None
        else:
            heapq.heappush(self._free, block)
