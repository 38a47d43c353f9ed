"""A model that knows no language: exact answers, exact times, at sizes that no test machine has.

Its KV is real: one 64-bit hash of the prefix per position, in paged blocks. The row at position p reads the hash at
p − 1 through `block_ids`, chains token p into it and stores the result at p; everything the model emits is computed
from that hash alone. So a stale, shifted or foreign KV entry shows as wrong letters, as it would in a real model.
"""

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvstate.protocol import Guesses, Logprobs
from models.backend import Move, Slice
from models.hashing import ROOT, mix, mix_text, unit

EOS = 256
LETTERS = tuple(b"abcdefghijklmnopqrstuvwxyz ")
VOCABULARY = "bytes+eos"

# What a hash of a prefix is asked for; each question has a number of its own, above all token ids.
_REFERENCE, _ERROR, _WRONG, _CONFIDENCE, _SECOND, _OWN = range(1 << 20, (1 << 20) + 6)


@dataclass(frozen=True, slots=True)
class EmulateSpec:
    """The `emulate` block of the config. `agreement` by prompt prefix needs the key `default`."""

    base_ms: float
    agreement: float | Mapping[str, float]
    per_token_ms: float = 0.0
    per_sequence_ms: float = 0.0
    errors: Literal["shared", "own"] = "shared"
    confidence_spread: float = 0.0
    context_len: int = 4096
    eos_after: int | None = None


@dataclass(frozen=True, slots=True)
class Voice:
    """How one model errs: all that `guess` needs besides the prefix. `rank` is the model's place in the config."""

    name_hash: int
    rank: int
    own_errors: bool
    confidence_spread: float


@dataclass(frozen=True, slots=True)
class Guess:
    """`token` is the sample; `confidence` the probability that it is the reference; `second` the next best letter."""

    token: int
    confidence: float
    second: int

    @property
    def both(self) -> Guesses:
        """The second letter is the reference in half of the cases in which the first is not."""
        return (self.token, self.confidence), (self.second, 0.5 * (1.0 - self.confidence))


def reference(prefix_hash: int) -> int:
    """The letter that an errorless model emits after this prefix."""
    return LETTERS[mix(prefix_hash, _REFERENCE) % len(LETTERS)]


def guess(prefix_hash: int, agreement: float, voice: Voice) -> Guess:
    """What a model emits after a prefix. Pure.

    A model is right where u < confidence; u is common to all models unless errors are their own. The wrong letter is
    common to all where errors are shared and confidence does not spread; else rank r takes the r-th letter after a
    common one, so that models of different rank never agree on a wrong letter (up to 26 models).
    """
    best = reference(prefix_hash)
    confidence = _confidence(prefix_hash, agreement, voice)
    source = voice.name_hash if voice.own_errors else _ERROR
    right = unit(mix(mix(prefix_hash, _ERROR), source)) < confidence
    wrong = _wrong_letter(prefix_hash, best, voice)
    if right:
        return Guess(best, confidence, wrong)
    keep_reference = unit(mix(mix(prefix_hash, _SECOND), voice.name_hash)) < 0.5
    return Guess(wrong, confidence, best if keep_reference else _other_letter(best, wrong))


def _confidence(prefix_hash: int, agreement: float, voice: Voice) -> float:
    spread = min(voice.confidence_spread, agreement, 1.0 - agreement)
    if spread <= 0.0:
        return agreement
    return agreement + spread * (2.0 * unit(mix(mix(prefix_hash, _CONFIDENCE), voice.name_hash)) - 1.0)


def _wrong_letter(prefix_hash: int, best: int, voice: Voice) -> int:
    apart = voice.rank if voice.own_errors or voice.confidence_spread > 0.0 else 0
    step = 1 + (mix(prefix_hash, _WRONG) + apart) % (len(LETTERS) - 1)
    return LETTERS[(LETTERS.index(best) + step) % len(LETTERS)]


def _other_letter(best: int, wrong: int) -> int:
    after_wrong = LETTERS[(LETTERS.index(wrong) + 1) % len(LETTERS)]
    return after_wrong if after_wrong != best else LETTERS[(LETTERS.index(best) + 1) % len(LETTERS)]


def sleep_precisely(duration_s: float) -> None:
    """Sleep to within a few µs: the kernel wakes up to ~100 µs late, so the last stretch is spun.

    The spin keeps the interpreter lock, for less time than a thread switch may wait for it anyway.
    """
    deadline_s = time.perf_counter() + duration_s
    if duration_s > 150e-6:
        time.sleep(duration_s - 150e-6)
    while time.perf_counter() < deadline_s:
        pass


class AgreementByPrompt:
    """Agreement of a sequence, decided by the longest text prefix that its prompt begins with."""

    def __init__(self, agreement: float | Mapping[str, float]) -> None:
        table = {"default": agreement} if isinstance(agreement, int | float) else dict(agreement)
        if "default" not in table:
            raise ValueError("emulate.agreement: a table of prompt prefixes needs the key `default`")
        if any(not 0.0 <= value <= 1.0 for value in table.values()):
            raise ValueError("emulate.agreement: values must lie in 0 … 1")
        self.default = table.pop("default")
        self._prefixes = sorted(((tuple(text.encode()), value) for text, value in table.items()), key=_longest_first)
        self._longest = len(self._prefixes[0][0]) if self._prefixes else 0

    def of(self, tokens: Sequence[int], prompt_len: int) -> float:
        if not self._prefixes:
            return self.default
        head = tuple(tokens[: min(self._longest, prompt_len)])
        return next((value for prefix, value in self._prefixes if head[: len(prefix)] == prefix), self.default)


def _longest_first(item: tuple[tuple[int, ...], float]) -> int:
    return -len(item[0])


class EmulatedBackend:
    """Implements `models.backend.Backend`. `sleep` takes seconds; the model's own hashing counts inside its time."""

    vocabulary = VOCABULARY
    end_ids = frozenset({EOS})

    def __init__(
        self,
        name: str,
        rank: int,
        spec: EmulateSpec,
        num_blocks: int,
        block_tokens: int = 16,
        sleep: Callable[[float], None] = sleep_precisely,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._name_hash = mix_text(mix(ROOT, _OWN), name)
        self._rank = rank
        self._sleep = sleep
        self._kv = array("Q", bytes(8 * num_blocks * block_tokens))
        self.update(spec)

    def update(self, spec: EmulateSpec) -> None:
        """Take new values; the next forward uses them. KV stays valid: it depends on tokens only."""
        self._agreement = AgreementByPrompt(spec.agreement)
        self._voice = Voice(self._name_hash, self._rank, spec.errors == "own", spec.confidence_spread)
        self._spec = spec
        self.context_len = spec.context_len

    def forward(self, slices: Sequence[Slice]) -> list[list[int | None]]:
        started_s = time.perf_counter()
        spec = self._spec
        samples = [self._run(slice_) for slice_ in slices]
        rows = sum(slice_.end - slice_.start for slice_ in slices)
        duration_ms = (
            spec.base_ms + spec.per_token_ms * rows + spec.per_sequence_ms * sum(not s.is_branch for s in slices)
        )
        self._sleep(max(0.0, duration_ms / 1e3 - (time.perf_counter() - started_s)))
        return samples

    def move(self, moves: Sequence[Move]) -> None:
        """See `Backend.move`."""
        size, kv = self.block_tokens, self._kv
        for from_block, from_offset, to_block, to_offset in moves:
            kv[to_block * size + to_offset] = kv[from_block * size + from_offset]

    def _run(self, slice_: Slice) -> list[int | None]:
        tokens, start, block_tokens, kv = slice_.tokens, slice_.start, self.block_tokens, self._kv
        prefix_hash = self._prefix_hash(slice_)
        agreement = self._agreement.of(tokens, slice_.prompt_len)
        samples: list[int | None] = []
        for position in range(start, slice_.end):
            prefix_hash = mix(prefix_hash, tokens[position])
            place = position - slice_.first
            kv[slice_.block_ids[place // block_tokens] * block_tokens + place % block_tokens] = prefix_hash
            if position >= slice_.sample_from:
                index = position + 1 - slice_.prompt_len
                may_end = not slice_.sampling.forbids(EOS, index)
                guessed = self._guess(prefix_hash, index if may_end else None, agreement)
                token = guessed.token
                samples.append(token)
                if slice_.logprobs is not None:
                    slice_.logprobs.rows.append(Logprobs(0.0, ((token, 0.0),)[: slice_.logprobs.num_top]))
                if slice_.guesses is not None:
                    slice_.guesses.rows.append(guessed.both[: slice_.guesses.num_guesses])
                if slice_.tops is not None:
                    slice_.tops.rows.append(((token, 1.0),))
        for position, block, offset in slice_.also:
            kv[block * block_tokens + offset] = self._prefix_hash_at(slice_, position)
        return samples

    def _prefix_hash(self, slice_: Slice) -> int:
        """Of the tokens before `start`; those before `first` were never computed."""
        if slice_.start > slice_.first:
            return self._prefix_hash_at(slice_, slice_.start - 1)
        prefix_hash = ROOT
        for token in slice_.tokens[: slice_.first]:
            prefix_hash = mix(prefix_hash, token)
        return prefix_hash

    def _prefix_hash_at(self, slice_: Slice, position: int) -> int:
        block, offset = divmod(position - slice_.first, self.block_tokens)
        return self._kv[slice_.block_ids[block] * self.block_tokens + offset]

    def _guess(self, prefix_hash: int, output_index: int | None, agreement: float) -> Guess:
        """`output_index` is None where the text may not end."""
        if output_index is not None and output_index == self._spec.eos_after:
            return Guess(EOS, 1.0, reference(prefix_hash))
        return guess(prefix_hash, agreement, self._voice)
