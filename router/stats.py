"""What a router counted since it started. An exporter turns it into metrics; rates are for whoever reads them."""

from collections import Counter
from dataclasses import dataclass, field

from kvstate.protocol import Timing


@dataclass(slots=True)
class RouterStats:
    """Keys: `requests` outcome, `chain_rounds` chain, `steps` (model, kind), `accepted_tokens` (lower, upper)."""

    requests: Counter[str] = field(default_factory=Counter)
    draft_tokens: Counter[str] = field(default_factory=Counter)
    accepted_tokens: Counter[tuple[str, str]] = field(default_factory=Counter)
    accepted_at_position: Counter[int] = field(default_factory=Counter)
    replica_losses: Counter[str] = field(default_factory=Counter)
    resumed_requests: Counter[str] = field(default_factory=Counter)
    chain_rounds: Counter[tuple[str, ...]] = field(default_factory=Counter)
    steps: Counter[tuple[str, str]] = field(default_factory=Counter)
    step_busy_s: dict[tuple[str, str], float] = field(default_factory=dict)
    queue_s: dict[str, float] = field(default_factory=dict)
    rounds: int = 0
    round_s: float = 0.0
    committed_tokens: int = 0
    probes: int = 0

    def add_step(self, model: str, kind: str, timing: Timing) -> None:
        self.steps[model, kind] += 1
        self.step_busy_s[model, kind] = self.step_busy_s.get((model, kind), 0.0) + timing.busy_s
        self.queue_s[model] = self.queue_s.get(model, 0.0) + timing.queue_s

    def add_check(self, lower: str, upper: str, num_accepted: int) -> None:
        self.accepted_tokens[lower, upper] += num_accepted
        self.accepted_at_position.update(range(num_accepted))
