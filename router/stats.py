"""What a router counted and timed since it started. An exporter turns it into metrics; readers make rates of it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import Histogram

from kvstate.protocol import Member, Timing

STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
WAIT_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

REPLICA_COUNTS = ("rolled_back_tokens", "stale_messages", "resent_prefixes")
MOST_REPLICAS_SEEN = 4096


def _histogram(
    name: str, text: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = STEP_BUCKETS_S
) -> Histogram:
    return Histogram(f"specrelay_{name}_seconds", text, labels, registry=None, buckets=buckets)


@dataclass(slots=True)
class RouterStats:
    """Keys: `requests` outcome, `chain_rounds` chain, `accepted_tokens` (lower, upper), `replica` (kind, model)."""

    requests: Counter[str] = field(default_factory=Counter)
    draft_tokens: Counter[str] = field(default_factory=Counter)
    accepted_tokens: Counter[tuple[str, str]] = field(default_factory=Counter)
    accepted_at_position: Counter[int] = field(default_factory=Counter)
    replica_losses: Counter[str] = field(default_factory=Counter)
    resumed_requests: Counter[str] = field(default_factory=Counter)
    chain_rounds: Counter[tuple[str, ...]] = field(default_factory=Counter)
    replica: Counter[tuple[str, str]] = field(default_factory=Counter)
    bad_frames: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    committed_tokens: int = 0
    probes: int = 0
    first_token_s: Histogram = field(
        default_factory=lambda: _histogram("time_to_first_token", "from a request's arrival", (), WAIT_BUCKETS_S)
    )
    inter_token_s: Histogram = field(
        default_factory=lambda: _histogram("inter_token_latency", "a round's time per token that it committed")
    )
    round_s: Histogram = field(default_factory=lambda: _histogram("round", "from drafting to the target's verdict"))
    step_s: Histogram = field(default_factory=lambda: _histogram("step", "time in batches per step", ("model", "kind")))
    queue_s: Histogram = field(default_factory=lambda: _histogram("queue", "a step's wait for its batch", ("model",)))
    _seen: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        return (self.first_token_s, self.inter_token_s, self.round_s, self.step_s, self.queue_s)

    def add_step(self, model: str, kind: str, timing: Timing) -> None:
        self.step_s.labels(model, kind).observe(timing.busy_s)
        self.queue_s.labels(model).observe(timing.queue_s)

    def add_check(self, lower: str, upper: str, num_accepted: int) -> None:
        self.accepted_tokens[lower, upper] += num_accepted
        self.accepted_at_position.update(range(num_accepted))

    def add_round(self, chain: tuple[str, ...], seconds: float, num_tokens: int) -> None:
        self.rounds += 1
        self.chain_rounds[chain] += 1
        self.round_s.observe(seconds)
        for _ in range(num_tokens):
            self.inter_token_s.observe(seconds / num_tokens)

    def add_replica_counts(self, members: Iterable[Member]) -> None:
        """What replicas counted since they were heard last.

        A replica counts from its start; a coordinator that was restarted says 0 until it has heard of it again.
        """
        for member in members:
            model, counts = member.info.model, member.counts
            seen = self._seen.setdefault(member.info.replica_id, Counter())
            for kind in REPLICA_COUNTS:
                self.replica[kind, model] += _rise(seen, kind, getattr(counts, kind))
            for reason, count in counts.bad_frames.items():
                self.bad_frames[reason] += _rise(seen, f"bad frame: {reason}", count)
        while len(self._seen) > MOST_REPLICAS_SEEN:
            del self._seen[next(iter(self._seen))]


def _rise(seen: Counter[str], kind: str, count: int) -> int:
    rise = max(0, count - seen[kind])
    seen[kind] += rise
    return rise
