"""Case 11: what is committed follows the target's distribution, however many levels drafted and checked it."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from benchmarks.inprocess import running
from kvstate.protocol import Sampling, Speculation
from models.backend import Move, Slice
from models.processing import Row
from models.sampling import sample

NUM_TOKENS = 1000
CRITICAL = {7: 24.32, 3: 16.27}
"""Chi-square by degrees of freedom, exceeded once in a thousand."""
LOGITS = {
    "a": [0.0, 0.5, 1.0, -1.0, 0.2, 0.3, -0.4, 1.2],
    "b": [0.6, 0.1, 0.9, -0.7, 0.0, 0.6, -0.2, 0.8],
    "t": [1.0, -0.2, 0.8, -0.5, 0.1, 0.9, 0.0, 0.5],
}


class TableBackend:
    """Eight tokens whose logits are the same after every text, so that all samples are of one distribution."""

    vocabulary = "eight"
    context_len = 4096
    block_tokens = 16
    num_blocks = 8192
    end_ids: frozenset[int] = frozenset()

    def __init__(self, logits: Sequence[float]) -> None:
        self.logits = torch.tensor(logits)

    def move(self, moves: Sequence[Move]) -> None:
        """There is no KV."""

    def forward(self, slices: Sequence[Slice]) -> list[list[int | None]]:
        made: list[list[int | None]] = []
        for s in slices:
            rows = [Row(position + 1, s.sampling, s.tokens, s.prompt_len) for position in range(s.sample_from, s.end)]
            made.append([*sample(self.logits.expand(len(rows), -1), rows)] if rows else [])
        return made


@pytest.mark.parametrize(("top_k", "freedom", "sequences"), [(0, 7, 10), (4, 3, 5)])
async def test_case_11_committed_tokens_follow_the_target_through_three_levels(
    top_k: int, freedom: int, sequences: int
) -> None:
    speculation = Speculation("fixed", ("a", "b", "t"), (1, 1))
    async with running({name: TableBackend(logits) for name, logits in LOGITS.items()}) as cluster:
        outputs = await asyncio.gather(
            *(
                cluster.generate([1, 2], Sampling(1.0, top_k, seed=seed), NUM_TOKENS, (), speculation)
                for seed in range(sequences)
            )
        )
    counts = Counter(token for output in outputs for token in output.tokens)
    assert sum(counts.values()) == sequences * NUM_TOKENS
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    assert 0 < sum(m.accepted_draft_tokens for m in metrics) < sum(m.draft_tokens for m in metrics)
    logits = torch.tensor(LOGITS["t"], dtype=torch.float64)
    allowed = logits.topk(top_k or 8).indices
    expected = torch.softmax(logits[allowed], dim=0) * sum(counts.values())
    assert set(counts) == set(allowed.tolist())
    observed = torch.tensor([counts[token] for token in allowed.tolist()], dtype=torch.float64)
    assert float(((observed - expected) ** 2 / expected).sum()) < CRITICAL[freedom]
