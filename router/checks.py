"""What steps and checks showed, as the estimators want to know it. Pure."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvstate.protocol import Timing
from router.fusion import Fused
from router.sequence import Holder


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


@dataclass(frozen=True, slots=True)
class ProposalsSeen:
    """What was drafted at positions that `upper` decided; `truth[j]` is its sample there."""

    upper: str
    fused: Sequence[Fused]
    truth: Sequence[int]


class Observer(Protocol):
    """Who learns from a sequence's rounds, and says what to believe of its drafters."""

    def timing(self, holder: Holder, kind: str, timing: Timing, round_trip_s: float) -> None: ...

    def drafted(self, model: str, num_asked: int, num_drafted: int) -> None: ...

    def checked(self, seen: CheckSeen) -> None: ...

    def proposed(self, seen: ProposalsSeen) -> None: ...

    def turn(self, drafters: Sequence[str], seconds: float) -> None:
        """What one position took that these drafted together."""

    def trust(self, drafter: str, stated: float) -> float:
        """As `router.fusion.Trust`."""
        ...

    def beside_trust(self) -> float:
        """As in `router.trees.grow`."""
        ...

    def turn_deadline_s(self, drafters: Sequence[str]) -> float:
        """How long drafters that draft together wait for one another."""
        ...


def origins_of(below: Sequence[str], num_accepted: int) -> list[Origin]:
    """Of the tokens that a check delivers; `below[i]` sampled the i-th that was checked."""
    kept = [Origin(Kind.KEPT, name) for name in below[:num_accepted]]
    own = Origin(Kind.CORRECTED, below[num_accepted]) if num_accepted < len(below) else Origin(Kind.EXTENDED)
    return [*kept, own]
