"""A 64-bit hash chained over token ids: plain integers, the same in every process and on every machine.

It serves the emulated model only; the sampling noise has a 32-bit hash of its own, which must also run on a GPU.
"""

_MASK = 2**64 - 1

ROOT = 0x2545_F491_4F6C_DD1D
"""The hash of the empty prefix."""


def mix(state: int, value: int) -> int:
    """The hash after `value` (≥ 0) follows `state`; one to one in `state`, so no common continuation merges two
    prefixes.
    """
    x = (state ^ ((value + 1) * 0x9E37_79B9_7F4A_7C15)) & _MASK
    x ^= x >> 32
    x = x * 0xD6E8_FEB8_6659_FD93 & _MASK
    x ^= x >> 32
    x = x * 0xD6E8_FEB8_6659_FD93 & _MASK
    return x ^ (x >> 32)


def mix_text(state: int, text: str) -> int:
    for byte in text.encode():
        state = mix(state, byte)
    return state


def unit(state: int) -> float:
    """The upper 53 bits of a hash as a number in [0, 1)."""
    return (state >> 11) * 2.0**-53
