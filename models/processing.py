"""What changes logits before a temperature does: bias, penalties, masks, in this order. One row at a time.

A row of a check sees the drafted tokens before it, as it would if they had been sampled one by one; so what a level
samples does not depend on how many rows it computes at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvstate.protocol import Sampling

NEUTRAL = Sampling()


@dataclass(frozen=True, slots=True)
class Row:
    """One sample to take: the token of index `position` in prompt + output, after `tokens[:position]`."""

    position: int
    sampling: Sampling
    tokens: Sequence[int] = ()
    prompt_len: int = 0

    @property
    def output_index(self) -> int:
        return self.position - self.prompt_len


def process(logits: torch.Tensor, row: Row) -> torch.Tensor:
    """The row's logits [V], changed in a copy where its sampling asks for it."""
    sampling = row.sampling
    masked = sampling.banned_ids + (sampling.end_ids if row.output_index < sampling.min_tokens else ())
    penalized = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)
    if not (sampling.logit_bias or masked or penalized):
        return logits
    scores = logits.clone()
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        scores.index_add_(0, _ids(ids, scores), torch.tensor(values, dtype=scores.dtype, device=scores.device))
    if penalized:
        _penalize(scores, row)
    if masked:
        scores[_ids(masked, scores)] = -torch.inf
    return scores


def _penalize(scores: torch.Tensor, row: Row) -> None:
    sampling, context = row.sampling, row.tokens[: row.position]
    if sampling.repetition_penalty != 1.0 and context:
        seen = torch.unique(_ids(context, scores))
        factor = torch.tensor(sampling.repetition_penalty, dtype=scores.dtype, device=scores.device)
        scores[seen] = torch.where(scores[seen] > 0, scores[seen] / factor, scores[seen] * factor)
    output = context[row.prompt_len :]
    if (sampling.presence_penalty or sampling.frequency_penalty) and output:
        ids, counts = torch.unique(_ids(output, scores), return_counts=True)
        scores[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts.to(scores.dtype)


def _ids(tokens: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(tokens), dtype=torch.long, device=scores.device)
