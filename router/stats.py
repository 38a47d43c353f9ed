"""What a router counted and timed since it started. An exporter turns it into metrics; readers make rates of it."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstate.protocol import Member, Timing

STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
WAIT_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

REPLICA_COUNTS = ("rolled_back_tokens", "stale_messages", "resent_prefixes")
MOST_REPLICAS_SEEN = 4096


@dataclass(slots=True)
class Histogram:
    """Seconds: `counts[i]` values were at most `bounds[i]` and above the bound before; the last counts the rest."""

    bounds: tuple[float, ...] = STEP_BUCKETS_S
    counts: list[int] = field(default_factory=list)
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.sum_s += seconds * times


@dataclass(slots=True)
class RouterStats:
    """Keys: `requests` outcome, `chain_rounds` chain, `accepted_tokens` (lower, upper), `replica` (kind, model),
    `step_s` (model, kind), `queue_s` model.

    first_token_s  from a request's arrival
    inter_token_s  a round's time per token that it committed
    step_s         time in batches per step
    queue_s        a step's waits for its batches
    """

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
    first_token_s: Histogram = field(default_factory=lambda: Histogram(WAIT_BUCKETS_S))
    inter_token_s: Histogram = field(default_factory=Histogram)
    round_s: Histogram = field(default_factory=Histogram)
    step_s: defaultdict[tuple[str, str], Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    queue_s: defaultdict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    _seen: dict[str, Counter[str]] = field(default_factory=dict)

    def add_step(self, model: str, kind: str, timing: Timing) -> None:
        self.step_s[model, kind].add(timing.busy_s)
        self.queue_s[model].add(timing.queue_s)

    def add_check(self, lower: str, upper: str, num_accepted: int) -> None:
        self.accepted_tokens[lower, upper] += num_accepted
        self.accepted_at_position.update(range(num_accepted))

    def add_round(self, chain: tuple[str, ...], seconds: float, num_tokens: int) -> None:
        self.rounds += 1
        self.chain_rounds[chain] += 1
        self.round_s.add(seconds)
        if num_tokens:
            self.inter_token_s.add(seconds / num_tokens, num_tokens)

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
