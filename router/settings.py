"""What a router is told: its models, and how it may choose. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """`models`: cheapest first, target last; `levels[i]` is that of models[i], its place in the list where none are
    given. `chain` and `windows` are used by the policy `fixed`.

    cooperate    most drafters of one level that make a draft together
    draft_ahead  whether drafters may go on while their draft is checked
    tree_nodes   most tokens that the target checks at once where a draft is checked with what else is likely; 0: none
    """

    models: tuple[str, ...]
    levels: tuple[int, ...] = ()
    policy: str = "adaptive"
    chain: tuple[str, ...] = ()
    windows: tuple[int, ...] = ()
    explore: float = 0.05
    max_window: int = 16
    slo_ms_per_token: float | None = None
    cooperate: int = 8
    draft_ahead: bool = True
    tree_nodes: int = 32
    max_queue: int = 256
    step_timeout_s: float = 10.0

    @property
    def target(self) -> str:
        return self.models[-1]

    @property
    def has_alternatives(self) -> bool:
        """Whether some level has several models."""
        return len(set(self.levels)) < len(self.levels)

    def level_of(self, model: str) -> int:
        index = self.models.index(model)
        return self.levels[index] if self.levels else index + 1
