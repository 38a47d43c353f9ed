"""`RouterStats` and the membership as Prometheus text. Collected when asked; labels are bounded."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from router.service import RouterCore
from router.stats import REPLICA_COUNTS, Histogram

PREFIX = "specrelay_"


class RouterMetrics:
    """A collector over one router core; `bad_frames` are those that this process received, by reason."""

    def __init__(self, core: RouterCore, bad_frames: Counter[str]) -> None:
        self._core = core
        self._bad_frames = bad_frames
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> str:
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterable[Metric]:
        yield from self._counters()
        yield from self._histograms()
        yield from self._gauges()

    def _counters(self) -> Iterable[Metric]:
        s = self._core.stats
        yield _counter("requests", ["outcome"], {(k,): v for k, v in s.requests.items()})
        yield _counter("rounds", [], {(): s.rounds})
        yield _counter("committed_tokens", [], {(): s.committed_tokens})
        yield _counter("draft_tokens", ["model"], {(k,): v for k, v in s.draft_tokens.items()})
        yield _counter("accepted_tokens", ["lower", "upper"], s.accepted_tokens)
        positions = {(str(k),): v for k, v in s.accepted_at_position.items()}
        yield _counter("accepted_at_position", ["position"], positions)
        yield _counter("replica_losses", ["model"], {(k,): v for k, v in s.replica_losses.items()})
        yield _counter("resumed_requests", ["cause"], {(k,): v for k, v in s.resumed_requests.items()})
        for kind in REPLICA_COUNTS:
            yield _counter(kind, ["model"], {(m,): v for (k, m), v in s.replica.items() if k == kind})
        yield _counter("bad_frames", ["reason"], {(k,): v for k, v in (s.bad_frames + self._bad_frames).items()})
        yield _counter("plan_changes", [], {(): self._core.planning.plan_changes})

    def _histograms(self) -> Iterable[Metric]:
        s = self._core.stats
        yield _histogram("time_to_first_token_seconds", [], {(): s.first_token_s})
        yield _histogram("inter_token_latency_seconds", [], {(): s.inter_token_s})
        yield _histogram("round_seconds", [], {(): s.round_s})
        yield _histogram("step_seconds", ["model", "kind"], s.step_s)
        yield _histogram("queue_seconds", ["model"], {(model,): h for model, h in s.queue_s.items()})

    def _gauges(self) -> Iterable[Metric]:
        core = self._core
        yield _gauge("open_sequences", [], {(): core.num_open})
        yield _gauge("queued_requests", [], {(): core.num_queued})
        pairs = core.planning.snapshot().pairs
        yield _gauge("pair_acceptance", ["lower", "upper"], {k: p.acceptance for k, p in pairs.items()})
        yield _gauge("pair_divergence", ["lower", "upper"], {k: p.divergence for k, p in pairs.items()})
        rounds = max(1, core.stats.rounds)
        shares = {("→".join(chain),): n / rounds for chain, n in core.stats.chain_rounds.items()}
        yield _gauge("chain_share", ["chain"], shares)
        yield from self._kv_gauges()

    def _kv_gauges(self) -> Iterable[Metric]:
        used: dict[tuple[str, ...], float] = {}
        total: dict[tuple[str, ...], float] = {}
        for member in self._core.members:
            info, key = member.info, (member.info.model,)
            if member.up:
                used[key] = used.get(key, 0) + (info.num_blocks - member.free_blocks) * info.block_tokens
                total[key] = total.get(key, 0) + info.num_blocks * info.block_tokens
        yield _gauge("kv_used_tokens", ["model"], used)
        yield _gauge("kv_total_tokens", ["model"], total)


def _counter(name: str, labels: list[str], values: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, name.replace("_", " "), labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family


def _histogram(name: str, labels: list[str], values: Mapping[Any, Histogram]) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, name.replace("_", " "), labels=labels)
    for key, histogram in values.items():
        bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
        family.add_metric(list(key), list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.sum_s)
    return family


def _gauge(name: str, labels: list[str], values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, name.replace("_", " "), labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family
