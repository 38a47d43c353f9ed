"""How a tree of drafted tokens is checked in one forward, each of its rows with the bits of plain decoding. Pure.

A row attends to what lies before it in a block table, in order of position. So a tree is cut into *branches*, runs of
nodes that follow one another, and each has a table of its own in which its ancestors stand before it: whole blocks are
those of the branch it leaves; the block in which it begins is its own, and what stands there before it is put there as
well, committed positions by copying and ancestors as they are computed (`Slice.also`). So every node is one row. After
the check the accepted nodes of other branches than the first are copied to their places in the sequence's table.

Letters: T positions of a block, L tokens known before the nodes. A node's position is L + its depth.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstate.protocol import Logprobs, Sampling, Top
from models.backend import LogprobSink, Move, Slice, TopSink

TakeBlocks = Callable[[int], Sequence[int] | None]
"""So many blocks that nobody else uses, for the time of the check; None where there are not as many."""


@dataclass(frozen=True, slots=True)
class Branch:
    """`nodes` in order; `parent`: the node that the first follows, None for the last known token."""

    nodes: tuple[int, ...]
    parent: int | None


@dataclass(frozen=True, slots=True)
class Tree:
    """Of drafted tokens; `parents` as in `Check`."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Most nodes that follow one another."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths)

    def ancestors(self, node: int | None) -> list[int]:
        """The node and those before it, from the root on."""
        path: list[int] = []
        while node is not None:
            path.append(node)
            node = self.parents[node] if self.parents[node] >= 0 else None
        return path[::-1]

    def branches(self) -> list[Branch]:
        """All nodes, parents before children. The first begins at the last known token."""
        runs: list[list[int]] = []
        of_node: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            run = of_node.get(parent)
            if run is not None and run[-1] == parent:
                run.append(node)
            else:
                run = [node]
                runs.append(run)
            of_node[node] = run
        return [Branch(tuple(run), self.parents[run[0]] if self.parents[run[0]] >= 0 else None) for run in runs]

    def accepted(self, after: Mapping[int, int]) -> list[int]:
        """Verification is equality: the path of nodes that equal the samples before them, from the root on.

        `after`: the sample after each node that was computed, and after the last known token, which is −1.
        """
        children = {key: node for node, key in enumerate(zip(self.parents, self.tokens, strict=True)) if node in after}
        path: list[int] = []
        while (child := children.get((path[-1] if path else -1, after[path[-1] if path else -1]))) is not None:
            path.append(child)
        return path


@dataclass(frozen=True, slots=True)
class Known:
    """The sequence before a tree: `tokens`, of which all but the last have KV in the blocks of `table`, which has room
    for as many positions more as the tree is deep.
    """

    tokens: Sequence[int]
    prompt_len: int
    sampling: Sampling
    table: Sequence[int]


@dataclass(slots=True)
class Layout:
    """One check of a tree: `slices[0]` has the row of the last known token and the first branch, one further slice each
    of the others.

    moves   committed positions to be copied before the forward
    tables  of each branch
    """

    tree: Tree
    known_len: int
    block_tokens: int
    branches: list[Branch]
    tables: list[list[int]]
    slices: list[Slice]
    moves: list[Move]

    @property
    def num_rows(self) -> int:
        return sum(s.end - s.start for s in self.slices)

    def samples(self, by_slice: Sequence[Sequence[int | None]]) -> dict[int, int]:
        """Those of the forward by node; −1 is the last known token."""
        nodes = [-1, *(node for branch in self.branches for node in branch.nodes)]
        sampled = [sample for samples in by_slice for sample in samples]
        return {node: sample for node, sample in zip(nodes, sampled, strict=True) if sample is not None}

    def compaction(self, path: Sequence[int]) -> list[Move]:
        """Copies that bring the accepted nodes to their places in the sequence's table."""
        branch_of = {node: index for index, branch in enumerate(self.branches) for node in branch.nodes}
        moves = []
        for position, node in enumerate(path, self.known_len):
            if branch_of[node] > 0:
                block, offset = divmod(position, self.block_tokens)
                moves.append(Move(self.tables[branch_of[node]][block], offset, self.tables[0][block], offset))
        return moves

    def rows_of(self, path: Sequence[int]) -> list[tuple[int, int]]:
        """(slice, its row) of the last known token and of each accepted node."""
        places = {-1: (0, 0)}
        for i, branch in enumerate(self.branches):
            places.update((node, (i, j)) for j, node in enumerate(branch.nodes, int(i == 0)))
        return [places[node] for node in (-1, *path)]

    def stated(self, path: Sequence[int]) -> tuple[tuple[Logprobs, ...], tuple[Top, ...]]:
        """Log-probabilities and likeliest tokens of the accepted tokens and the own one, where they were asked for."""
        rows = [(self.slices[i], j) for i, j in self.rows_of(path)]
        logprobs = tuple(s.logprobs.rows[j] for s, j in rows if s.logprobs is not None)
        return logprobs, tuple(s.tops.rows[j] for s, j in rows if s.tops is not None)


def lay_out(
    tree: Tree, known: Known, block_tokens: int, take_blocks: TakeBlocks, num_logprobs: int = -1, num_top: int = 0
) -> Layout:
    """The forward that checks `tree`. Branches for which there are no blocks are left out."""
    layout = Layout(tree, len(known.tokens), block_tokens, [], [list(known.table)], [], [])
    also: dict[int, list[tuple[int, int]]] = {}  # by node, −1 for the last known token: (block, offset)
    for branch in tree.branches():
        if layout.branches and not _add_table(layout, branch, take_blocks, also):
            break
        layout.branches.append(branch)
    for branch, own_table in zip(layout.branches, layout.tables, strict=True):
        is_first = not layout.slices
        nodes = (-1, *branch.nodes) if is_first else branch.nodes
        tokens = [*known.tokens, *(tree.tokens[node] for node in (*tree.ancestors(branch.parent), *branch.nodes))]
        start, end = len(tokens) - len(nodes), len(tokens)
        logprobs = LogprobSink(num_logprobs) if num_logprobs >= 0 else None
        tops = TopSink(num_top) if num_top > 0 else None
        places = tuple((start + j, *place) for j, node in enumerate(nodes) for place in also.get(node, ()))
        layout.slices.append(
            Slice(
                tokens, start, end, start, known.prompt_len, own_table, known.sampling, logprobs,
                tops=tops, also=places, is_branch=not is_first,
            )
        )  # fmt: skip
    return layout


def _add_table(layout: Layout, branch: Branch, take_blocks: TakeBlocks, also: dict[int, list[tuple[int, int]]]) -> bool:
    """The table of a further branch, and what must be put in its own blocks before its first node. False: no blocks."""
    tree, size, known_len = layout.tree, layout.block_tokens, layout.known_len
    path = tree.ancestors(branch.parent)
    start = known_len + len(path)
    first_own = start // size
    blocks = take_blocks(-(-(start + len(branch.nodes)) // size) - first_own)
    if blocks is None:
        return False
    left = next((i for i, other in enumerate(layout.branches) if branch.parent in other.nodes), 0)
    table = [*layout.tables[left][:first_own], *blocks]
    for position in range(first_own * size, start):
        block, offset = table[first_own], position % size
        if position < known_len - 1:
            layout.moves.append(Move(layout.tables[0][first_own], offset, block, offset))
        else:
            also.setdefault((-1, *path)[position - known_len + 1], []).append((block, offset))
    layout.tables.append(table)
    return True
