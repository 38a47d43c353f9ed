"""The target's text by other means: transformers' own forward and cache, and a sampler of a few lines of numpy.

It shares nothing with the served code but the folder of weights, so that a fault in attention, paged KV, noise or
sampling shows as a difference. One token per forward, one request at a time.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from models.weights import prepare

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ReferenceText:
    """`margins[i]`: by how much the score of output token i (with its noise) beats the second best."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


class Reference:
    """The model of one source, as transformers loads and runs it."""

    def __init__(self, source: str, revision: str | None, dtype: torch.dtype) -> None:
        self.folder: Path = prepare(source, revision)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=dtype, local_files_only=True
        ).eval()

    @torch.inference_mode()
    def generate(
        self, prompt: Sequence[int], temperature: float, seed: int, max_tokens: int, stop_ids: Collection[int]
    ) -> ReferenceText:
        """At most `max_tokens` tokens; a stop id is the last one. Temperature 0 is greedy."""
        tokens: list[int] = []
        margins: list[float] = []
        cache: Any = transformers.DynamicCache()
        pending = list(prompt)
        while len(tokens) < max_tokens:
            output = self._model(torch.tensor([pending]), cache=cache, use_cache=True)
            logits = output.logits[0, -1].float().numpy()
            token, margin = _choose(logits, temperature, seed, len(prompt) + len(tokens))
            tokens.append(token)
            margins.append(margin)
            pending = [token]
            if token in stop_ids:
                break
        return ReferenceText(tuple(tokens), tuple(margins))


def gumbel(seed: int, position: int, vocabulary_len: int) -> Floats:
    """The noise of every token id at one index of prompt + output: float32 [V], computed in float64."""
    with np.errstate(over="ignore"):  # hashing is arithmetic modulo 2^64
        seeded = _scramble(np.array([seed % 2**64], np.uint64) + GOLDEN)
        key = _scramble(seeded + GOLDEN * np.array([position + 1], np.uint64))
        words = _scramble(key + GOLDEN * np.arange(1, vocabulary_len + 1, dtype=np.uint64))
    uniform = ((words >> np.uint64(32)).astype(np.float64) + 0.5) / 2.0**32
    return (-np.log(-np.log1p(uniform - 1.0))).astype(np.float32)


def _scramble(words: Words) -> Words:
    """SplitMix64's output function."""
    words = (words ^ (words >> np.uint64(30))) * FIRST
    words = (words ^ (words >> np.uint64(27))) * SECOND
    return words ^ (words >> np.uint64(31))


def _choose(logits: Floats, temperature: float, seed: int, position: int) -> tuple[int, float]:
    """The id with the best score and its lead over the second best; ties go to the lowest id."""
    scores = logits
    if temperature > 0.0:
        scores = logits / np.float32(temperature) + gumbel(seed, position, len(logits))
    best = int(np.argmax(scores))
    second = max(scores[:best].max(initial=-np.inf), scores[best + 1 :].max(initial=-np.inf))
    return best, float(scores[best] - second)
