"""What a check showed, as the estimators want to know it. Pure."""

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """Of a token that a level delivered: kept from the level below; its own, in place of a rejected one; its own, after
    it kept them all.
    """

    KEPT = enum.auto()
    CORRECTED = enum.auto()
    EXTENDED = enum.auto()


@dataclass(frozen=True, slots=True)
class CheckSeen:
    """`upper` checked `num_checked` tokens that `lower` delivered and accepted the first `num_accepted`.

    `num_asked`: where the tokens are one draft, how many it was asked for. Else `kinds` are those of the tokens, and
    `below` is the level that `lower` checked.
    """

    lower: str
    upper: str
    num_checked: int
    num_accepted: int
    num_asked: int = 0
    below: str | None = None
    kinds: tuple[Kind, ...] = ()


def kinds_of(num_checked: int, num_accepted: int) -> list[Kind]:
    """Of the tokens that a check delivers."""
    return [Kind.KEPT] * num_accepted + [Kind.EXTENDED if num_accepted == num_checked else Kind.CORRECTED]
