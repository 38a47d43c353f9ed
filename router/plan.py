"""What a round runs: a chain, its windows, and who drafts on where the first drafter ends. Pure."""

from dataclasses import dataclass

Chain = tuple[str, ...]
Windows = tuple[int, ...]

CASCADE = "+"
"""Between the names of drafters of which the second goes on after the first; no name has one."""


@dataclass(frozen=True, slots=True)
class Tail:
    """A cheaper drafter that goes on with `window` tokens after the first one's whole draft; both are checked at once.

    `stop_below` as in Plan, for its part of the draft alone.
    """

    model: str
    window: int
    stop_below: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """`windows[i]` belongs to `chain[i + 1]`; the target alone has none.

    `stop_below`: a drafter that knows how likely its tokens are right ends a draft that would be right with a smaller
    probability. `keeps_step`: requests that all run it come back to their checker together (`TableSnapshot.uneven`).
    """

    chain: Chain
    windows: Windows
    predicted_ms_per_token: float
    stop_below: float = 0.0
    tail: Tail | None = None
    keeps_step: bool = True

    @property
    def drafters(self) -> Chain:
        """All models but the target."""
        return self.chain[:-1] if self.tail is None else (self.tail.model, *self.chain[:-1])

    @property
    def label(self) -> Chain:
        """The chain as it is shown: a cascade of drafters is `first+tail`."""
        return self.chain if self.tail is None else (f"{self.chain[0]}{CASCADE}{self.tail.model}", *self.chain[1:])

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Whose tokens are checked by whom."""
        checked = [*zip(self.chain, self.chain[1:], strict=False)]
        return checked if self.tail is None else [*checked, (self.tail.model, self.chain[1])]


def split_cascade(element: str) -> tuple[str, str | None]:
    """A chain's first element, as in `Plan.label`: the first drafter, and the tail."""
    first, _, tail = element.partition(CASCADE)
    return first, tail or None
