"""The live latency/divergence table: what each model costs, and how far each pair of models agrees.

`RouterTable` is fed with the timings and verdicts of every round and of the probes; `snapshot()` freezes it for the
planner. Pairs are ordered (lower level, upper level); they are followed over all requests and, apart from that, over
those of each context. It knows neither clocks nor clients, and never the config's emulation.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from kvstate.protocol import Profile, Timing, Top
from router.acceptance import Acceptance, Association, Dispersion, PositionRates, log_odds, shift_rate
from router.checks import CheckSeen, Kind
from router.divergence import DivergenceEstimate
from router.keys import EVERY, Context, Pair, Triple
from router.latency import Ewma, LatencyFit
from router.learned import NOTHING, Learned, PairLearned
from router.snapshot import ModelCost, PairEstimate, TableSnapshot

MUCH_FASTER = 0.8
BATCH_SHARE = 0.1
"""Of the newest batch in what is known of sharing and waiting."""

GUESSED_WAIT, GUESSED_IDLE = 0.25, 2 / 3
"""What requests out of step wait for a model, in batches, where none was seen: they find it busy unless all others are
elsewhere; those who wait come closer to step again, so it is less than half a batch.
"""

NO_TOPS: Mapping[str, Sequence[Top]] = {}
MOST_COMPARED = 8
"""Positions of a probe whose distributions are compared, per pair: it takes the router's time."""

DOUBTED_SAMPLES = 32
PROBED_POSITIONS = 32.0
"""How many probed positions the share of tokens accepted in rounds is worth as a guess of the agreement."""

CONTEXT_POSITIONS = 24.0
"""How many positions of a context the estimate over all requests is worth there."""


def _over_batches() -> Ewma:
    return Ewma(share=BATCH_SHARE)


@dataclass(slots=True)
class _Model:
    level: int
    fit: LatencyFit
    hops_ms: dict[str, Ewma] = field(default_factory=dict)
    queue_ms: Ewma = field(default_factory=_over_batches)
    queue_batches: Ewma = field(default_factory=_over_batches)
    uneven_queue_batches: Ewma = field(default_factory=_over_batches)
    sharing: Ewma = field(default_factory=lambda: Ewma(value=1.0, share=BATCH_SHARE))
    drafts: PositionRates = field(default_factory=PositionRates)

    def cost(self, name: str, num_open: int) -> ModelCost:
        base_ms, per_token_ms, per_sequence_ms = self.fit.coefficients
        hop_ms = min((hop.value for hop in self.hops_ms.values()), default=0.0)
        continues = tuple(self.drafts.rates(1.0))
        even, uneven = self.queue_batches.value, self.uneven_queue_batches.value
        if not self.uneven_queue_batches.count:
            uneven = max(even, GUESSED_WAIT * (1.0 - GUESSED_IDLE ** (num_open - 1)))
        return ModelCost(
            name, self.level, base_ms, per_token_ms, per_sequence_ms, hop_ms,
            self.queue_ms.value, even, uneven, self.sharing.value, continues, self.fit.count,
        )  # fmt: skip


@dataclass(slots=True)
class _Pair:
    acceptance: Acceptance = field(default_factory=Acceptance)
    probed: Acceptance = field(default_factory=Acceptance)
    drafts: PositionRates = field(default_factory=PositionRates)
    dispersion: Dispersion = field(default_factory=Dispersion)
    distributions: DivergenceEstimate = field(default_factory=DivergenceEstimate)

    def estimate(self, lower: str, upper: str, of_all: PairEstimate | None = None) -> PairEstimate:
        """`of_all`: where this is the pair in one context, what few positions leave open."""
        samples, prior_positions = self.acceptance.samples, self.dispersion.prior_positions
        if of_all is None:
            rate = self.acceptance.rate
            agreement = self.probed.rate_from(rate, PROBED_POSITIONS)
            goes_on = tuple(self.drafts.rates(rate))
        else:
            rate = self.acceptance.rate_from(of_all.acceptance, CONTEXT_POSITIONS)
            agreement = self.probed.rate_from(1.0 - of_all.divergence, CONTEXT_POSITIONS)
            unlike = log_odds(rate) - log_odds(of_all.acceptance)
            likely = [shift_rate(goes_on, unlike) for goes_on in of_all.goes_on] or [rate]
            goes_on = tuple(self.drafts.rates_from(likely, CONTEXT_POSITIONS))
        bounds = None if of_all is None else of_all.bounds
        if self.distributions.has_spread:
            bounds = self.distributions.bounds
        divergence = 1.0 - agreement if bounds is None else bounds.divergence.middle
        return PairEstimate(lower, upper, rate, divergence, samples, goes_on, prior_positions, bounds)

    @property
    def learned(self) -> PairLearned:
        return PairLearned(self.acceptance.counts, self.probed.counts, self.drafts.counts, self.dispersion.learned)

    @classmethod
    def restored(cls, learned: PairLearned) -> "_Pair":
        dispersion = Dispersion.restored(learned.dispersion)
        acceptance, probed = Acceptance.restored(learned.acceptance), Acceptance.restored(learned.probed)
        acceptance.dispersion = probed.dispersion = dispersion.ratio
        return cls(acceptance, probed, PositionRates.restored(learned.drafts), dispersion)

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
    """Starts from each model's profile, and from what was `learned` before; a model can be added at any time.

    `num_open`: requests that there are.
    """

    def __init__(self, learned: Learned = NOTHING) -> None:
        self._learned = learned
        self._models: dict[str, _Model] = {}
        self._pairs: dict[Pair, _Pair] = {}
        self._contexts: dict[Context, dict[Pair, _Pair]] = {}
        self._triples: dict[Triple, Association] = {}
        self.num_open = 1

    def add_model(self, name: str, level: int, profile: Profile) -> bool:
        """Whether it is new. A known model keeps what was learned about it: a restarted replica is the same model."""
        if name in self._models:
            return False
        drafts = PositionRates.restored(self._learned.drafts.get(name, []))
        self._models[name] = _Model(level, LatencyFit(profile), drafts=drafts)
        for other, model in self._models.items():
            if model.level != level:
                lower, upper = (name, other) if level < model.level else (other, name)
                self._pairs[lower, upper] = _Pair()
        self._restore(name)
        return True

    def _restore(self, name: str) -> None:
        """What was learned of the model and those that are known already."""
        for context, pair, learned in self._learned.pairs:
            if name in pair and pair in self._pairs:
                entries = self._pairs if context == EVERY else self._contexts.setdefault(context, {})
                entries[pair] = _Pair.restored(learned)
        for triple, counts in self._learned.triples:
            if name in triple and all(model in self._models for model in triple):
                self._triples[triple] = Association.restored(counts)

    def learned(self) -> Learned:
        """What is worth keeping."""
        contexts = [(EVERY, self._pairs), *self._contexts.items()]
        return Learned(
            {name: model.drafts.counts for name, model in self._models.items()},
            [(context, pair, entry.learned) for context, pairs in contexts for pair, entry in pairs.items()],
            [(triple, association.counts) for triple, association in self._triples.items()],
        )

    @property
    def models(self) -> tuple[str, ...]:
        """Names, cheapest level first."""
        return tuple(sorted(self._models, key=lambda name: self._models[name].level))

    def observe_timing(
        self, model: str, replica_id: str, timing: Timing, round_trip_s: float, keeps_step: bool = True
    ) -> float:
        """One reply: what its batches cost, and what the way there and back took besides them. Returns what they were
        expected to cost, in ms, on a replica like all of the model's; 0 where there were none.

        `keeps_step`: as in the plan that the step belongs to.
        """
        if timing.batches <= 0:
            return 0.0
        entry = self._models[model]
        expected_ms = entry.fit.observe(timing)
        weight = 1.0 / entry.sharing.value  # all that share a batch tell of it, so each counts that much less
        entry.sharing.add(timing.sequences / timing.batches, weight)
        entry.queue_ms.add(timing.queue_s * 1e3, weight)
        queues = entry.queue_batches if keeps_step else entry.uneven_queue_batches
        queues.add(timing.queue_s * timing.batches / max(1e-6, timing.busy_s), weight)
        hop = entry.hops_ms.setdefault(replica_id, Ewma())
        hop_ms = _hop_ms(timing, round_trip_s)
        hop.add(hop_ms if hop.count < 5 else min(hop_ms, 3.0 * hop.value + 0.5))
        return expected_ms

    def observe_probe_timing(self, model: str, replica_id: str, timing: Timing, round_trip_s: float) -> None:
        """A probe runs beside a round and may share processors with it, as no step of a chain does: it can show that a
        model is faster than was known, never that it is slower.
        """
        if timing.batches <= 0:
            return
        entry = self._models[model]
        if timing.busy_s * 1e3 < MUCH_FASTER * entry.fit.predict_ms(timing):
            entry.fit.take_over(timing)
        hop = entry.hops_ms.setdefault(replica_id, Ewma())
        hop_ms = _hop_ms(timing, round_trip_s)
        if hop.count == 0 or hop_ms < hop.value:
            hop.add(hop_ms)

    def observe_draft(self, model: str, num_asked: int, num_drafted: int) -> None:
        """A draft that ended early had one more position at which it did not go on."""
        self._models[model].drafts.observe(num_drafted, num_asked)

    def observe_check(self, seen: CheckSeen, context: Context = EVERY) -> None:
        for pair in self._in(context, (seen.lower, seen.upper)):
            pair.observe_check(seen.num_checked, seen.num_accepted, seen.num_asked)
        for j, (kind, below) in enumerate(seen.origins[: seen.num_accepted + 1]):
            if kind is not Kind.EXTENDED:
                triple = self._triples.setdefault((below, seen.lower, seen.upper), Association())
                triple.observe(kind is Kind.KEPT, j < seen.num_accepted)

    def observe_request(self, pair: Pair, num_positions: float, num_accepted: float, context: Context = EVERY) -> None:
        """A request ended: how many positions of it were examined, and how many of them accepted."""
        for entry in self._in(context, pair):
            entry.observe_request(num_positions, num_accepted)

    def observe_probe(
        self,
        samples: Mapping[str, Sequence[int | None]],
        context: Context = EVERY,
        tops: Mapping[str, Sequence[Top]] = NO_TOPS,
    ) -> None:
        """Samples of several models at the same committed positions: a trial for each pair and position both guessed
        at.

        The target's samples are the committed tokens. Pairs that rounds check as well count both: they are the same
        trials. `tops`: the likeliest tokens at these positions, where they were stated.
        """
        names = [name for name in self.models if name in samples]
        for name in names:
            for sample in samples[name]:
                self._models[name].drafts.observe(int(sample is not None), 1)
        for lower, upper in filter(self._pairs.__contains__, combinations(names, 2)):
            for pair in self._in(context, (lower, upper)):
                pair.observe_probe(samples[lower], samples[upper])
        for lower, upper in combinations((name for name in names if name in tops), 2):
            if (lower, upper) in self._pairs:
                known = [pair for pair in zip(tops[lower], tops[upper], strict=True) if all(pair)][-MOST_COMPARED:]
                for entry in self._in(context, (lower, upper)):
                    entry.distributions.observe([p for p, _ in known], [q for _, q in known])
        for triple in combinations(names, 3):
            if all(pair in self._pairs for pair in combinations(triple, 2)):
                association = self._triples.setdefault(triple, Association())
                for a, b, c in zip(*(samples[name] for name in triple), strict=True):
                    if None not in (a, b, c):
                        association.observe(a == b, b == c)

    def _in(self, context: Context, pair: Pair) -> Iterator[_Pair]:
        """The pair's entry of all requests, and that of the context, to be changed."""
        tables = [self._pairs] if context == EVERY else [self._pairs, self._contexts.setdefault(context, {})]
        for entries in tables:
            entry = entries.setdefault(pair, _Pair())
            num_changes = entry.acceptance.num_changes
            yield entry
            if entry.acceptance.num_changes > num_changes:
                _doubt(entries, pair)

    def remove_replica(self, model: str, replica_id: str) -> None:
        self._models[model].hops_ms.pop(replica_id, None)

    @property
    def contexts(self) -> list[Context]:
        """Of which requests were seen, that of all first."""
        return [EVERY, *sorted(self._contexts)]

    def snapshot(self, context: Context = EVERY) -> TableSnapshot:
        """As it is for requests of a context; where it was never seen, or a pair in it, as for all."""
        models = {name: self._models[name].cost(name, self.num_open) for name in self.models}
        pairs = {key: pair.estimate(*key) for key, pair in self._pairs.items()}
        for key, pair in self._contexts.get(context, {}).items():
            pairs[key] = pair.estimate(*key, pairs[key])
        association = {triple: association.strength for triple, association in self._triples.items()}
        return TableSnapshot(models, pairs, association, self.num_open)


def _doubt(entries: Mapping[Pair, _Pair], changed: Pair) -> None:
    """One of the two models is not what it was: what is known of its other pairs is worth as little as few positions,
    so that they are probed.
    """
    for pair, entry in entries.items():
        if pair != changed and set(pair) & set(changed):
            entry.acceptance.samples = min(entry.acceptance.samples, DOUBTED_SAMPLES)


def _hop_ms(timing: Timing, round_trip_s: float) -> float:
    return max(0.0, (round_trip_s - timing.busy_s - timing.queue_s) * 1e3)
