"""What an engine asks of a model: one forward over packed rows of many sequences.

A *row* is one token of one sequence run through the model at its position; the row at position p gives the sample for
position p + 1. Letters: R rows in all, S slices (one per sequence), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvstate.protocol import Guesses, Logprobs, Sampling, Top


@dataclass(slots=True)
class LogprobSink:
    """Takes the log-probabilities of each sampled row, in order, with those of the `num_top` likeliest tokens."""

    num_top: int
    rows: list[Logprobs] = field(default_factory=list)


@dataclass(slots=True)
class TopSink:
    """Takes the `num_top` likeliest tokens of each sampled row, in order; an empty one where the model knows none."""

    num_top: int
    rows: list[Top] = field(default_factory=list)


@dataclass(slots=True)
class GuessSink:
    """Takes the `num_guesses` likeliest tokens of each sampled row, in order, the sample first; nothing at rows without
    a sample.
    """

    num_guesses: int
    rows: list[Guesses] = field(default_factory=list)


class Move(NamedTuple):
    """The KV of one position is copied: from an offset of one block to one of another."""

    from_block: int
    from_offset: int
    to_block: int
    to_offset: int


@dataclass(frozen=True, slots=True)
class Slice:
    """The rows of one sequence in one forward: positions `start` … `end` − 1, KV below `start` being computed.

    tokens       all token ids of the sequence known so far, at least `end` of them; must not be changed or kept
    sample_from  rows at positions `sample_from` … `end` − 1 give samples; `end` itself when none does
    prompt_len   how many of the tokens are the prompt
    block_ids    KV blocks of the sequence, enough for `end` − `first` positions; position p lives in
                 block_ids[(p − first) // block_tokens]
    logprobs     filled by the forward, where somebody wants them; `tops` and `guesses` likewise
    first        the model reads the sequence from this position on, as if it began there
    stop_below   a backend that knows how likely its samples are the target's gives None once all drafted so far are
                 right together with a smaller probability
    also         (position, block, offset): where the KV of a row is stored besides its own place, for slices after this
                 one whose rows see it there (models/trees.py)
    is_branch    a further slice of the sequence of the one before it
    """

    tokens: Sequence[int]
    start: int
    end: int
    sample_from: int
    prompt_len: int
    block_ids: Sequence[int]
    sampling: Sampling
    logprobs: LogprobSink | None = None
    stop_below: float = 0.0
    first: int = 0
    tops: TopSink | None = None
    guesses: GuessSink | None = None
    also: tuple[tuple[int, int, int], ...] = ()
    is_branch: bool = False


class Backend(Protocol):
    """A model with its KV. Called from one thread only.

    vocabulary   fingerprint of the token ids' meaning; equal for models that can stand in one chain
    context_len  most positions of a sequence
    end_ids      token ids after which this model drafts nothing more
    """

    vocabulary: str
    context_len: int
    block_tokens: int
    num_blocks: int
    end_ids: frozenset[int]

    def forward(self, slices: Sequence[Slice]) -> list[list[int | None]]:
        """Compute the KV of every row and sample where asked.

        Returns for each slice the samples of its rows `sample_from` … `end` − 1, in order; None where the model has no
        guess worth checking (n-gram only). The target of a chain never returns None.
        """
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Copy the KV of some positions; nothing is read that is written."""
        ...
