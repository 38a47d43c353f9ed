"""The Gumbel noise g(seed, position, token) that every level of a chain adds to its scores (docs/noise.md).

A counter-based hash, so the same numbers come out in every process and on every device: the 64-bit output function of
SplitMix (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) applied to the seed,
then to the position, then to the token id. All integer arithmetic is modulo 2^64; torch's int64 wraps the same way.
"""

import torch

from models.seeds import FIRST, GOLDEN, MASK, SECOND, key

MOST = 22.8743
"""Every g lies below it (u is at least 0.5 / 2^32 from 1)."""


def h32(seed: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """Hashes of the token ids (int64, any shape) as int64 values in [0, 2^32), on the tokens' device."""
    word = tokens * _signed(GOLDEN) + _signed((key(seed, position) + GOLDEN) & MASK)
    word = (word ^ _shifted(word, 30)) * _signed(FIRST)
    word = (word ^ _shifted(word, 27)) * _signed(SECOND)
    return _shifted(word ^ _shifted(word, 31), 32)


def gumbel(seed: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise for the token ids (int64, any shape): float32, computed in float64."""
    uniform = (h32(seed, position, tokens).to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(uniform - 1.0)).to(torch.float32)


def _signed(word: int) -> int:
    """The int64 with the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(word: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right: torch's own shift copies the sign."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)
