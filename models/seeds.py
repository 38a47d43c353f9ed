"""Seeds in plain integers: of the choices of a request, and of the noise at one position. Without torch."""

GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1


def scramble(word: int) -> int:
    """SplitMix64's output function: a bijection of 64-bit words."""
    word = ((word ^ (word >> 30)) * FIRST) & MASK
    word = ((word ^ (word >> 27)) * SECOND) & MASK
    return word ^ (word >> 31)


def key(seed: int, position: int) -> int:
    """The 64-bit word from which the noise of all tokens at one position of one seed is hashed."""
    return scramble((scramble((seed + GOLDEN) & MASK) + GOLDEN * (position + 1)) & MASK)


def mix(seed: int, prompt_index: int, choice_index: int) -> int:
    """The seed of choice i of prompt j of one request; the first choice of the first prompt has the seed itself."""
    if prompt_index == 0 and choice_index == 0:
        return seed
    return key(key(seed, prompt_index), choice_index)
