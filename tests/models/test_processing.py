"""Bias, penalties and masks against plain arithmetic, for every row of a block as if its tokens had come one by one."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvstate.protocol import Sampling
from models.processing import Row, process
from models.sampling import sample

V = 8
LOGITS = torch.tensor([1.0, -0.5, 2.0, 0.3, -1.2, 0.0, 1.5, -2.0])
PROMPT, OUTPUT = [2, 2, 4], [6, 2, 6, 1]


def row(sampling: Sampling, num_output: int = len(OUTPUT)) -> Row:
    """The row after `num_output` output tokens; the tokens past it are drafts it must not see."""
    return Row(len(PROMPT) + num_output, sampling, PROMPT + OUTPUT, len(PROMPT))


@pytest.mark.parametrize("num_output", range(len(OUTPUT) + 1))
def test_case_7_repetition_counts_prompt_and_output_before_the_row(num_output: int) -> None:
    context = torch.tensor([PROMPT + OUTPUT[:num_output]])
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.7)(context, LOGITS[None].clone())[0]
    assert torch.equal(process(LOGITS, row(Sampling(repetition_penalty=1.7), num_output)), expected)


@pytest.mark.parametrize("num_output", range(len(OUTPUT) + 1))
def test_case_7_presence_and_frequency_count_the_output_before_the_row(num_output: int) -> None:
    expected = LOGITS.tolist()
    for token, count in Counter(OUTPUT[:num_output]).items():
        expected[token] -= 0.5 + 0.25 * count
    got = process(LOGITS, row(Sampling(presence_penalty=0.5, frequency_penalty=0.25), num_output))
    assert got.tolist() == pytest.approx(expected)


def test_bias_comes_before_penalties_and_masks_last() -> None:
    bias = ((2, 3.0), (1, 0.25))
    got = process(LOGITS, row(Sampling(logit_bias=bias, repetition_penalty=2.0, banned_ids=(6,))))
    assert got.tolist() == pytest.approx([1.0, -0.5, 2.5, 0.3, -2.4, 0.0, -torch.inf, -2.0])


@pytest.mark.parametrize(("num_output", "masked"), [(0, True), (2, True), (3, False), (4, False)])
def test_case_5_the_end_is_masked_at_every_row_before_min_tokens(num_output: int, masked: bool) -> None:
    got = process(LOGITS, row(Sampling(end_ids=(2, 6), min_tokens=3), num_output))
    assert [bool(torch.isinf(got[token])) for token in (2, 6, 0)] == [masked, masked, False]


def test_neutral_values_change_nothing() -> None:
    assert process(LOGITS, row(Sampling(0.7, 3, 0.9, 5, 0.1))) is LOGITS


def allowed_by_transformers(sampling: Sampling) -> set[int]:
    warpers: list[transformers.LogitsProcessor] = [
        transformers.TemperatureLogitsWarper(sampling.temperature),
        transformers.MinPLogitsWarper(sampling.min_p),
    ]
    if sampling.top_k:
        warpers.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(transformers.TopPLogitsWarper(sampling.top_p))
    scores = LOGITS[None].clone()
    for warp in warpers:
        scores = warp(torch.tensor([PROMPT]), scores)
    return set(torch.nonzero(torch.isfinite(scores[0])).flatten().tolist())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, min_p=0.1),
        Sampling(0.5, min_p=0.3),
        Sampling(1.5, 4, 1.0, min_p=0.05),
        Sampling(1.0, 5, 0.8, 0, 0.1),
    ],
)
def test_case_8_min_p_leaves_what_transformers_leaves(sampling: Sampling) -> None:
    rows = [Row(i, replace(sampling, seed=seed)) for i in range(200) for seed in range(3)]
    assert set(sample(LOGITS.expand(len(rows), -1), rows)) == allowed_by_transformers(sampling)


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.8, 1.5]),
    top_k=st.integers(0, 4),
    top_p=st.sampled_from([0.6, 1.0]),
    seed=st.integers(0, 2**63),
    min_p=st.sampled_from([0.0, 0.1]),
    logit_bias=st.sampled_from([(), ((3, 2.0),), ((0, -100.0), (5, 1.0))]),
    repetition_penalty=st.sampled_from([1.0, 1.4, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    banned_ids=st.sampled_from([(), (1,)]),
    end_ids=st.sampled_from([(), (2,)]),
    min_tokens=st.integers(0, 3),
)


@settings(deadline=None)
@given(st.lists(SAMPLINGS, min_size=1, max_size=3))
def test_case_8_a_block_samples_what_single_rows_do(samplings: Sequence[Sampling]) -> None:
    logits = torch.randn(len(samplings) * 5, V, generator=torch.Generator().manual_seed(1))
    rows = [row(sampling, num_output) for sampling in samplings for num_output in range(5)]
    alone = [
        sample(logits[i : i + 1], [Row(r.position, r.sampling, r.tokens[: r.position], 3)]) for i, r in enumerate(rows)
    ]
    assert sample(logits, rows) == [token for [token] in alone]
    for token, r in zip(sample(logits, rows), rows, strict=True):
        assert not r.sampling.forbids(token, r.output_index)
