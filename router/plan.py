"""What a round runs: a chain, its windows, and who drafts on where the first drafter ends. Pure."""

from dataclasses import dataclass

Chain = tuple[str, ...]
Windows = tuple[int, ...]

CASCADE = "+"
"""Between the names of drafters of which the second goes on after the first; no name has one."""

GROUP = "|"
"""Between the names of drafters that make one draft together, position by position; no name has one."""


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
    """`windows[i]` belongs to `chain[i + 1]`; the target alone has none. The first of the chain may be a group.

    `goes_on`: drafters do not wait for the check of their draft; `tree_nodes`: with what else they hold likely, up to
    so many tokens are checked at once.
    `stop_below`: a drafter that knows how likely its tokens are right ends a draft that would be right with a smaller
    probability. `keeps_step`: requests that all run it come back to their checker together (`TableSnapshot.uneven`).
    """

    chain: Chain
    windows: Windows
    predicted_ms_per_token: float
    stop_below: float = 0.0
    tail: Tail | None = None
    keeps_step: bool = True
    goes_on: bool = False
    tree_nodes: int = 0

    @property
    def drafters(self) -> Chain:
        """All models but the target."""
        drafters = (*members_of(self.chain[0]), *self.chain[1:-1]) if len(self.chain) > 1 else ()
        return drafters if self.tail is None else (self.tail.model, *drafters)

    @property
    def label(self) -> Chain:
        """The chain as it is shown: a cascade of drafters is `first+tail`."""
        return self.chain if self.tail is None else (f"{self.chain[0]}{CASCADE}{self.tail.model}", *self.chain[1:])

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Whose tokens are compared with whose."""
        if len(self.chain) == 1:
            return []
        tail = () if self.tail is None else (self.tail.model,)
        first = [(name, self.chain[1]) for name in (*members_of(self.chain[0]), *tail)]
        return [*first, *zip(self.chain[1:], self.chain[2:], strict=False)]

    @property
    def kind(self) -> Chain:
        """The label without the names in a group: there are too many groups to count each."""
        names = members_of(self.chain[0])
        return self.label if len(names) == 1 else (f"{len(names)} drafters", *self.label[1:])


def stated(element: str) -> str | list[str]:
    """A chain's element as users write it: a group is a list of names."""
    return element if GROUP not in element or CASCADE in element else element.split(GROUP)


def members_of(element: str) -> tuple[str, ...]:
    """Of a chain: a model, or the models of a group."""
    return tuple(element.split(GROUP))


def split_cascade(element: str) -> tuple[str, str | None]:
    """A chain's first element, as in `Plan.label`: the first drafter, and the tail."""
    first, _, tail = element.partition(CASCADE)
    return first, tail or None
