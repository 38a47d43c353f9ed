"""What a check showed, as the estimators want to know it. Pure."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Kind(enum.Enum):
    """Of a token that a level delivered: kept from the level below; its own, in place of a rejected one; its own, after
    it kept them all.
    """

    KEPT = enum.auto()
    CORRECTED = enum.auto()
    EXTENDED = enum.auto()


class Origin(NamedTuple):
    """`below`: whose token was kept or replaced."""

    kind: Kind
    below: str = ""


@dataclass(frozen=True, slots=True)
class CheckSeen:
    """`upper` checked `num_checked` tokens that `lower` delivered and accepted the first `num_accepted`.

    `num_asked`: where the tokens are one draft, how many it was asked for. Else `origins` are those of the tokens.
    """

    lower: str
    upper: str
    num_checked: int
    num_accepted: int
    num_asked: int = 0
    origins: tuple[Origin, ...] = ()


def origins_of(below: Sequence[str], num_accepted: int) -> list[Origin]:
    """Of the tokens that a check delivers; `below[i]` sampled the i-th that was checked."""
    kept = [Origin(Kind.KEPT, name) for name in below[:num_accepted]]
    own = Origin(Kind.CORRECTED, below[num_accepted]) if num_accepted < len(below) else Origin(Kind.EXTENDED)
    return [*kept, own]
