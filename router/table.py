"""The live latency/divergence table: what each model costs, and how far each pair of models agrees.

`RouterTable` is fed with the timings and verdicts of every round and of the probes; `snapshot()` freezes it for the
planner. Pairs are ordered (lower level, upper level). It knows neither clocks nor clients, and never the config's
emulation.

What it does not know yet: request classes and sampling regimes (one row per pair: class `all`, regime `all`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvstate.protocol import Profile, Timing
from router.acceptance import MOST_PRIOR_POSITIONS, PRIOR_ACCEPTANCE, Acceptance, Dispersion, PositionRates
from router.latency import Ewma, LatencyFit

MUCH_FASTER = 0.8
ALL_ALIKE = 100.0
"""`prior_positions` from which on requests are taken to be all alike."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """One model now. A call waits `queue_ms`, takes one `hop_ms`, and its batches carry `sharing` sequences in the
    mean. `join_ms`: where the model must first compute what it missed of a sequence, that, per token to come.

    `draft_continues[j]` is the probability that a draft of j tokens goes on for one more: below 1 where a model may
    have no guess, as the last one says for longer drafts, 1 where nothing is known.
    """

    name: str
    level: int
    base_ms: float
    per_token_ms: float = 0.0
    per_sequence_ms: float = 0.0
    hop_ms: float = 0.0
    queue_ms: float = 0.0
    sharing: float = 1.0
    draft_continues: tuple[float, ...] = ()
    samples: int = 0
    join_ms: float = 0.0

    def batch_ms(self, rows: float) -> float:
        """A batch with `rows` rows of this sequence, the others that share it bringing as many each."""
        return self.base_ms + (self.per_token_ms * rows + self.per_sequence_ms) * self.sharing

    @property
    def row_ms(self) -> float:
        """What one more row of this sequence adds to a batch, the others that share it bringing one more each."""
        return self.per_token_ms * self.sharing

    @property
    def row_share(self) -> float:
        """Of a whole call with one row."""
        return self.row_ms / max(1e-9, self.batch_ms(1.0) + self.call_ms)

    @property
    def call_ms(self) -> float:
        """What a call costs besides its batches."""
        return self.hop_ms + self.queue_ms


@dataclass(frozen=True, slots=True)
class PairEstimate:
    """`acceptance`: share of lower tokens that equal the upper's samples; `divergence`: 1 − agreement on probes.

    `goes_on[j]`: of a draft checked at once, the probability that after j accepted tokens one more was drafted and
    accepted; as the last one says further on, and nothing where no draft was checked yet. `prior_positions`: how many
    of its own positions a request must show to be believed as much as this.
    """

    lower: str
    upper: str
    acceptance: float
    divergence: float
    samples: int
    goes_on: tuple[float, ...] = ()
    prior_positions: float = MOST_PRIOR_POSITIONS


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    models: Mapping[str, ModelCost]
    pairs: Mapping[tuple[str, str], PairEstimate]

    def acceptance(self, lower: str, upper: str) -> float:
        pair = self.pairs.get((lower, upper))
        return PRIOR_ACCEPTANCE if pair is None else pair.acceptance

    def draft_continues(self, drafter: str, window: int) -> list[float]:
        """For drafts of 0 … `window` − 1 tokens."""
        return extended(self.models[drafter].draft_continues or (1.0,), window)

    def draft_goes_on(self, drafter: str, checker: str, window: int) -> list[float]:
        """After 0 … `window` − 1 accepted tokens."""
        pair = self.pairs.get((drafter, checker))
        if pair is not None and pair.goes_on:
            return extended(pair.goes_on, window)
        acceptance = self.acceptance(drafter, checker)
        return [acceptance * continues for continues in self.draft_continues(drafter, window)]


def _hop_ms(timing: Timing, round_trip_s: float) -> float:
    return max(0.0, (round_trip_s - timing.busy_s - timing.queue_s) * 1e3)


def extended(rates: Sequence[float], length: int) -> list[float]:
    """The first `length` of them, the last one repeated where there are fewer."""
    return [*rates[:length], *[rates[-1]] * (length - len(rates))]


@dataclass(slots=True)
class _Model:
    level: int
    fit: LatencyFit
    hops_ms: dict[str, Ewma] = field(default_factory=dict)
    queue_ms: Ewma = field(default_factory=Ewma)
    sharing: Ewma = field(default_factory=lambda: Ewma(value=1.0))
    drafts: PositionRates = field(default_factory=PositionRates)

    def cost(self, name: str) -> ModelCost:
        base_ms, per_token_ms, per_sequence_ms = self.fit.coefficients
        hop_ms = min((hop.value for hop in self.hops_ms.values()), default=0.0)
        continues = tuple(self.drafts.rates(1.0))
        return ModelCost(
            name, self.level, base_ms, per_token_ms, per_sequence_ms, hop_ms,
            self.queue_ms.value, self.sharing.value, continues, self.fit.count,
        )  # fmt: skip


@dataclass(slots=True)
class _Pair:
    acceptance: Acceptance = field(default_factory=Acceptance)
    probed: Acceptance = field(default_factory=Acceptance)
    drafts: PositionRates = field(default_factory=PositionRates)
    dispersion: Dispersion = field(default_factory=Dispersion)

    def estimate(self, lower: str, upper: str) -> PairEstimate:
        rate = self.acceptance.rate
        agreement = self.probed if self.probed.samples else self.acceptance
        goes_on = tuple(self.drafts.rates(rate))
        samples, prior_positions = self.acceptance.samples, self.dispersion.prior_positions
        return PairEstimate(lower, upper, rate, 1.0 - agreement.rate, samples, goes_on, prior_positions)

    def observe_request(self, num_positions: float, num_accepted: float) -> None:
        self.dispersion.observe(num_positions, num_accepted)
        self.acceptance.dispersion = self.probed.dispersion = self.dispersion.ratio

    def observe_probe(self, lower: Sequence[int | None], upper: Sequence[int | None]) -> None:
        equal = [a == b for a, b in zip(lower, upper, strict=True) if a is not None and b is not None]
        self.probed.observe(sum(equal), len(equal))
        self.acceptance.observe(sum(equal), len(equal))
        for a, b in zip(lower, upper, strict=True):
            self.drafts.observe(int(a is not None and a == b), 1, self.dispersion.ratio)

    def observe_check(self, num_checked: int, num_accepted: int, num_asked: int) -> None:
        self.acceptance.observe_check(num_checked, num_accepted)
        if num_asked:
            self.drafts.observe(num_accepted, num_asked, self.dispersion.ratio)


class RouterTable:
    """Starts from each model's profile; a model can be added at any time."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}
        self._pairs: dict[tuple[str, str], _Pair] = {}

    def add_model(self, name: str, level: int, profile: Profile) -> bool:
        """Whether it is new. A known model keeps what was learned about it: a restarted replica is the same model."""
        if name in self._models:
            return False
        self._models[name] = _Model(level, LatencyFit(profile))
        for other, model in self._models.items():
            if model.level != level:
                lower, upper = (name, other) if level < model.level else (other, name)
                self._pairs[lower, upper] = _Pair()
        return True

    @property
    def models(self) -> tuple[str, ...]:
        """Names, cheapest level first."""
        return tuple(sorted(self._models, key=lambda name: self._models[name].level))

    def observe_timing(self, model: str, replica_id: str, timing: Timing, round_trip_s: float) -> None:
        """One reply: what its batches cost, and what the way there and back took besides them."""
        if timing.batches <= 0:
            return
        entry = self._models[model]
        entry.fit.observe(timing)
        entry.sharing.add(timing.sequences / timing.batches)
        entry.queue_ms.add(timing.queue_s * 1e3)
        hop = entry.hops_ms.setdefault(replica_id, Ewma())
        hop_ms = _hop_ms(timing, round_trip_s)
        hop.add(hop_ms if hop.count < 5 else min(hop_ms, 3.0 * hop.value + 0.5))

    def observe_probe_timing(self, model: str, replica_id: str, timing: Timing, round_trip_s: float) -> None:
        """A probe runs beside a round and may share processors with it, as no step of a chain does: it can show that a
        model is faster than was known, never that it is slower.
        """
        if timing.batches <= 0:
            return
        entry = self._models[model]
        if timing.busy_s * 1e3 < MUCH_FASTER * entry.fit.predict_ms(timing):
            entry.fit.observe(timing)
        hop = entry.hops_ms.setdefault(replica_id, Ewma())
        hop_ms = _hop_ms(timing, round_trip_s)
        if hop.count == 0 or hop_ms < hop.value:
            hop.add(hop_ms)

    def observe_draft(self, model: str, num_asked: int, num_drafted: int) -> None:
        """A draft that ended early had one more position at which it did not go on."""
        self._models[model].drafts.observe(num_drafted, num_asked)

    def observe_check(self, lower: str, upper: str, num_checked: int, num_accepted: int, num_asked: int = 0) -> None:
        """`upper` checked `num_checked` tokens that `lower` sampled and accepted the first `num_accepted`.

        `num_asked`: where the tokens are one draft, how many it was asked for.
        """
        self._pairs[lower, upper].observe_check(num_checked, num_accepted, num_asked)

    def observe_request(self, pair: tuple[str, str], num_positions: float, num_accepted: float) -> None:
        """A request ended: how many positions of it were examined, and how many of them accepted."""
        self._pairs[pair].observe_request(num_positions, num_accepted)

    def observe_probe(self, samples: Mapping[str, Sequence[int | None]]) -> None:
        """Samples of several models at the same committed positions: a trial for each pair and position both guessed
        at.

        The target's samples are the committed tokens. Pairs that rounds check as well count both: they are the same
        trials.
        """
        for name, own in samples.items():
            for sample in own:
                self._models[name].drafts.observe(int(sample is not None), 1)
        for (lower, upper), pair in self._pairs.items():
            if lower in samples and upper in samples:
                pair.observe_probe(samples[lower], samples[upper])

    def remove_replica(self, model: str, replica_id: str) -> None:
        self._models[model].hops_ms.pop(replica_id, None)

    def snapshot(self) -> TableSnapshot:
        models = {name: self._models[name].cost(name) for name in self.models}
        pairs = {key: pair.estimate(*key) for key, pair in self._pairs.items()}
        return TableSnapshot(models, pairs)


def as_rows(snapshot: TableSnapshot) -> dict[str, list[dict[str, object]]]:
    """`models` and `pairs` of GET /router/table; replicas are added by who knows the membership."""
    models = [_model_row(model) for model in snapshot.models.values()]
    return {"models": models, "pairs": list(_pair_rows(snapshot.pairs.values()))}


def _model_row(model: ModelCost) -> dict[str, object]:
    return {
        "name": model.name,
        "level": model.level,
        "base_ms": model.base_ms,
        "per_token_ms": model.per_token_ms,
        "per_sequence_ms": model.per_sequence_ms,
        "queue": model.queue_ms,
    }


def _pair_rows(pairs: Iterable[PairEstimate]) -> Iterable[dict[str, object]]:
    for pair in sorted(pairs, key=lambda pair: (pair.lower, pair.upper)):
        yield {
            "lower": pair.lower,
            "upper": pair.upper,
            "class": "all",
            "regime": "all",
            "divergence": pair.divergence,
            "acceptance": pair.acceptance,
            "samples": pair.samples,
        }
