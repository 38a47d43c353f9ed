"""One sample per position: the argmax of processed logits plus the position's noise.

Order of processing: bias, penalties and masks (models/processing.py), temperature, min_p, top_k, top_p; each of these
narrows the set of allowed token ids. The distribution after them is the softmax over the allowed ids, and
argmax(score + Gumbel noise) draws from exactly that, without normalising.
Letters: R rows, V vocabulary, A allowed ids of one row.
"""

import math
from collections.abc import Sequence

import torch
from msgspec.structs import replace

from kvstate.protocol import Guesses, Logprobs, Sampling, Top
from models import noise
from models.processing import NEUTRAL, Row, process

GREEDY_BELOW = 1e-5
_LIKELY = 32
"""Tokens among which the best after the sample is looked for: a likely token's noise rarely lets another one in."""

_HEAD = 1024
"""top_p sorts only this many candidates where they hold the wanted mass: sorting a whole vocabulary takes ms."""


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < GREEDY_BELOW


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """One token id per row of `logits` [R, V]; float64 is scored in float64, everything else in float32.

    Ties go to the lowest id. One transfer from the device in all.
    """
    assert logits.dim() == 2
    assert len(rows) == logits.shape[0]
    if not rows:
        return []
    logits = logits if logits.dtype == torch.float64 else logits.float()
    greedy = torch.argmax(logits, dim=-1)  # torch documents that the first of equal maxima is returned
    if all(_is_plain(row.sampling) for row in rows):
        return [int(token) for token in greedy.tolist()]
    chosen = [
        greedy[index] if _is_plain(row.sampling) else _choose(process(logits[index], row), row)
        for index, row in enumerate(rows)
    ]
    return [int(token) for token in torch.stack(chosen).tolist()]


def logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[Logprobs]:
    """Of the token of each row of raw `logits` [R, V], and of the `num_top` likeliest; of equals the lower ids."""
    scores = torch.log_softmax(logits.double() if logits.dtype == torch.float64 else logits.float(), dim=-1)
    found = scores[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.long)].tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if num_top > 0 and tokens:
        ids = torch.stack([_top_k(row, min(num_top, row.shape[0])) for row in scores])
        tops = [_by_score(*pair) for pair in zip(ids.tolist(), scores.gather(1, ids).tolist(), strict=True)]
    return [Logprobs(value, top) for value, top in zip(found, tops, strict=True)]


def tops(logits: torch.Tensor, rows: Sequence[Row], num_top: int) -> list[Top]:
    """The likeliest tokens of the distribution that each row of `logits` [R, V] is sampled from (protocol.Top)."""
    assert len(rows) == logits.shape[0]
    if not rows:
        return []
    logits = logits if logits.dtype == torch.float64 else logits.float()
    scores = torch.stack([_sampled_scores(logits[index], row) for index, row in enumerate(rows)])
    best = torch.topk(scores, min(num_top, scores.shape[1]))
    probabilities = torch.exp(best.values - torch.logsumexp(scores, dim=-1, keepdim=True))
    found = zip(best.indices.tolist(), probabilities.tolist(), strict=True)
    return [tuple(pair for pair in zip(*row, strict=True) if pair[1] > 0.0) for row in found]


def guesses(logits: torch.Tensor, rows: Sequence[Row], samples: Sequence[int], num_guesses: int) -> list[Guesses]:
    """The tokens of best score, noise included, at each row of `logits` [R, V], the row's sample first.

    How probable each is comes from the margins between their scores: the softmax over those stated, two at least.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    count = max(2, num_guesses)
    return [
        _best(_sampled_scores(logits[index], row), row, token, count)[:num_guesses]
        for index, (row, token) in enumerate(zip(rows, samples, strict=True))
    ]


def _best(scores: torch.Tensor, row: Row, token: int, count: int) -> Guesses:
    """Of the likely tokens of one row [V] and its sample, which may not be one of them."""
    ids = torch.topk(scores, min(_LIKELY, scores.shape[0])).indices
    ids = torch.cat((ids[ids != token], torch.tensor([token], device=ids.device)))
    perturbed = scores[ids].double()
    if not is_greedy(row.sampling):
        perturbed = perturbed + noise.gumbel(row.sampling.seed, row.position, ids).double()
    best = torch.topk(perturbed, min(count, len(ids)))
    found = zip(ids[best.indices].tolist(), torch.softmax(best.values, dim=0).tolist(), strict=True)
    return tuple(sorted((pair for pair in found if pair[1] > 0.0), key=lambda pair: (pair[0] != token, -pair[1])))


def _sampled_scores(logits: torch.Tensor, row: Row) -> torch.Tensor:
    """Scores [V] whose softmax a row [V] is sampled from; greedy ones at temperature 1."""
    scores, sampling = process(logits, row), row.sampling
    if is_greedy(sampling):
        return scores
    scores = _tempered(scores, sampling)
    ids = _allowed(scores, sampling)
    return scores if ids is None else torch.full_like(scores, -torch.inf).index_copy_(0, ids, scores[ids])


def _by_score(ids: Sequence[int], scores: Sequence[float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(zip(ids, scores, strict=True), key=lambda pair: -pair[1]))


def _is_plain(sampling: Sampling) -> bool:
    """Greedy, on logits as they are."""
    return is_greedy(sampling) and replace(sampling, temperature=0.0, top_k=0, top_p=1.0, seed=0, min_p=0.0) == NEUTRAL


def _choose(logits: torch.Tensor, row: Row) -> torch.Tensor:
    """The sample of one row [V] of processed logits, as a tensor without dimensions."""
    return torch.argmax(logits) if is_greedy(row.sampling) else _draw(logits, row.position, row.sampling)


def _draw(logits: torch.Tensor, position: int, sampling: Sampling) -> torch.Tensor:
    """The sample of one row [V] at a temperature."""
    scores = _tempered(logits, sampling)
    ids = _allowed(scores, sampling)
    kept = scores if ids is None else scores[ids]
    tokens = torch.arange(scores.shape[0], device=scores.device) if ids is None else ids
    if ids is None and scores.device.type == "cpu":  # elsewhere a set of unknown size would wait for the device
        near = torch.nonzero(kept >= _least_winning(kept, position, sampling)).squeeze(-1)
        kept, tokens = kept[near], tokens[near]
    best = torch.argmax(kept + noise.gumbel(sampling.seed, position, tokens))
    return tokens[best]


def _tempered(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """A tensor divisor, because CUDA replaces division by a plain number with multiplication by its rounded inverse."""
    return logits / torch.tensor(sampling.temperature, dtype=logits.dtype, device=logits.device)


def _least_winning(scores: torch.Tensor, position: int, sampling: Sampling) -> torch.Tensor:
    """A score below which no token can win: the best of 32 likely tokens with their noise, less the largest noise."""
    top, ids = torch.topk(scores, min(32, scores.shape[0]))
    return torch.max(top + noise.gumbel(sampling.seed, position, ids)) - noise.MOST - 1e-3


def _allowed(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
    """Ids [A] that may win, ascending; None if all may."""
    ids: torch.Tensor | None = None
    if sampling.min_p > 0.0:
        ids = torch.nonzero(scores >= torch.max(scores) + math.log(sampling.min_p)).squeeze(-1)
    if 0 < sampling.top_k < (scores.shape[0] if ids is None else ids.shape[0]):
        kept = _top_k(scores if ids is None else scores[ids], sampling.top_k)
        ids = kept if ids is None else ids[kept]
    if sampling.top_p < 1.0:
        kept = _top_p(scores if ids is None else scores[ids], sampling.top_p)
        ids = kept if ids is None else ids[kept]
    return ids


def _top_k(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` highest scores, ascending; of equal scores the lower ids."""
    least = torch.topk(scores, count).values[-1]
    above = torch.nonzero(scores > least).squeeze(-1)
    equal = torch.nonzero(scores == least).squeeze(-1)
    return torch.sort(torch.cat((above, equal[: count - above.shape[0]]))).values


def _top_p(scores: torch.Tensor, mass: float) -> torch.Tensor:
    """Indices, ascending, of the smallest set of highest scores whose probabilities sum to `mass` or more.

    Sums in float64, so that the set does not depend on the order in which a device adds; at least one index.
    """
    total = torch.logsumexp(scores.double(), dim=0)
    kept: torch.Tensor | None = None
    if scores.shape[0] > _HEAD:
        least = torch.topk(scores, _HEAD).values[-1]
        kept = _smallest_set(scores, torch.nonzero(scores >= least).squeeze(-1), total, mass)
    if kept is None:
        everything = torch.arange(scores.shape[0], device=scores.device)
        kept = _smallest_set(scores, everything, total, mass)
        kept = everything if kept is None else kept  # rounding left the whole sum just below the mass
    return torch.sort(kept).values


def _smallest_set(scores: torch.Tensor, ids: torch.Tensor, total: torch.Tensor, mass: float) -> torch.Tensor | None:
    """The first of `ids`, by (score descending, id ascending), that reach `mass`; None if all of them do not."""
    order = torch.sort(scores[ids], descending=True, stable=True).indices
    sums = torch.cumsum(torch.exp(scores[ids[order]].double() - total), dim=0)
    if float(sums[-1]) < mass:
        return None
    return ids[order[: int(torch.sum(sums < mass)) + 1]]
