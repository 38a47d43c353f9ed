"""Case 11: what is committed follows the target's distribution, whoever drafted and checked it."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from benchmarks.inprocess import running
from kvstate.protocol import Sampling, Speculation
from models.backend import Move, Slice
from models.processing import Row
from models.sampling import guesses, sample
from router.settings import RouterSettings

NUM_TOKENS = 1000
CRITICAL = {7: 24.32, 3: 16.27}
"""Chi-square by degrees of freedom, exceeded once in a thousand."""
LOGITS = {
    "a": [0.0, 0.5, 1.0, -1.0, 0.2, 0.3, -0.4, 1.2],
    "b": [0.6, 0.1, 0.9, -0.7, 0.0, 0.6, -0.2, 0.8],
    "c": [0.9, -0.3, 0.4, 0.2, 0.1, 1.1, 0.1, 0.3],
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
            logits = self.logits.expand(len(rows), -1)
            samples = sample(logits, rows) if rows else []
            made.append([*samples])
            if s.guesses is not None:
                s.guesses.rows.extend(guesses(logits, rows, samples, s.guesses.num_guesses))
        return made


async def assert_targets_distribution(
    settings: RouterSettings, speculation: Speculation, top_k: int, num_tokens: int, sequences: int
) -> None:
    async with running({name: TableBackend(LOGITS[name]) for name in settings.models}, settings) as cluster:
        outputs = await asyncio.gather(
            *(
                cluster.generate([1, 2], Sampling(1.0, top_k, seed=seed), num_tokens, (), speculation)
                for seed in range(sequences)
            )
        )
    counts = Counter(token for output in outputs for token in output.tokens)
    assert sum(counts.values()) == sequences * num_tokens
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    assert 0 < sum(m.accepted_draft_tokens for m in metrics) < sum(m.draft_tokens for m in metrics)
    logits = torch.tensor(LOGITS["t"], dtype=torch.float64)
    allowed = logits.topk(top_k or 8).indices
    expected = torch.softmax(logits[allowed], dim=0) * sum(counts.values())
    assert set(counts) == set(allowed.tolist())
    observed = torch.tensor([counts[token] for token in allowed.tolist()], dtype=torch.float64)
    assert float(((observed - expected) ** 2 / expected).sum()) < CRITICAL[len(allowed) - 1]


@pytest.mark.parametrize(("top_k", "sequences"), [(0, 10), (4, 5)])
async def test_case_11_committed_tokens_follow_the_target_through_three_levels(top_k: int, sequences: int) -> None:
    chain = ("a", "b", "t")
    speculation = Speculation("fixed", chain, (1, 1))
    await assert_targets_distribution(RouterSettings(chain), speculation, top_k, NUM_TOKENS, sequences)


@pytest.mark.parametrize("windows", [(5,), ()], ids=["fusion", "fusion and a tree"])
async def test_case_11_committed_tokens_follow_the_target_through_fusion(windows: tuple[int, ...]) -> None:
    """Where windows are planned, drafts are trees."""
    settings = RouterSettings(("a", "b", "c", "t"), levels=(1, 1, 1, 2))
    await assert_targets_distribution(settings, Speculation("fixed", ("a|b|c", "t"), windows), 0, 400, 8)
