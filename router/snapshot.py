"""The table at one moment, frozen: what the planner reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from router.acceptance import MOST_PRIOR_POSITIONS, PRIOR_ACCEPTANCE
from router.checks import CheckSeen
from router.divergence import Bounds
from router.keys import Pair, Triple
from router.renewal import Rates

ALL_ALIKE = 100.0
"""`prior_positions` from which on requests are taken to be all alike."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """One model now. A call waits `queue_ms`, which is `queue_batches` of its batches, and takes one `hop_ms`; its
    batches carry `sharing` sequences in the mean. `join_ms`: where the model must first compute what it missed of a
    sequence, that, per token to come. `uneven_queue_batches`: see `TableSnapshot.uneven`.

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
    queue_batches: float = 0.0
    uneven_queue_batches: float = 0.0
    sharing: float = 1.0
    draft_continues: tuple[float, ...] = ()
    samples: int = 0
    join_ms: float = 0.0

    def batch_ms(self, rows: float) -> float:
        """A batch with `rows` rows of this sequence, the others that share it bringing as many each."""
        return self.base_ms + (self.per_token_ms * rows + self.per_sequence_ms) * self.sharing

    def call_ms(self, rows: float) -> float:
        """One batch, the way there and back, and the wait for batches of others before it, which take as long."""
        return self.hop_ms + self.batch_ms(rows) * (1.0 + self.queue_batches)

    @property
    def row_ms(self) -> float:
        """What one more row of this sequence adds to a call, the others that share its batches, or are waited for,
        bringing one more each.
        """
        return self.per_token_ms * self.sharing * (1.0 + self.queue_batches)

    @property
    def row_share(self) -> float:
        """Of a whole call with one row."""
        return self.row_ms / max(1e-9, self.call_ms(1.0))


@dataclass(frozen=True, slots=True)
class PairEstimate:
    """`acceptance`: share of lower tokens that equal the upper's samples; `divergence` of the distributions, the middle
    of what is known of it, 1 − agreement on probes where all are point masses. `bounds`: of both
    (router/divergence.py).

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
    bounds: Bounds | None = None


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """`association`: see `Association`; a triple that is not in it is taken to be independent. `num_open`: requests
    that there are.
    """

    models: Mapping[str, ModelCost]
    pairs: Mapping[Pair, PairEstimate]
    association: Mapping[Triple, float] = field(default_factory=dict)
    num_open: int = 1

    def uneven(self) -> "TableSnapshot":
        """The table as plans meet it whose requests do not keep step with one another.

        Requests that all draft and check in turn come back together, and hardly wait. Where a middle level collects,
        each takes as many steps as chance will have it; where a draft takes longer than the checker waits, it begins
        with those that are there. Then they meet models busy with others.
        """
        models = {name: replace(cost, queue_batches=cost.uneven_queue_batches) for name, cost in self.models.items()}
        return replace(self, models=models)

    def acceptance(self, lower: str, upper: str) -> float:
        pair = self.pairs.get((lower, upper))
        return PRIOR_ACCEPTANCE if pair is None else pair.acceptance

    def rates(self, below: str, lower: str, upper: str) -> Rates:
        """With which probability `upper` accepts what `lower` accepted from `below`, and its own tokens."""
        acceptance, agreement = self.acceptance(lower, upper), self.acceptance(below, lower)
        strength = self.association.get((below, lower, upper), 0.0)
        most, least = min(acceptance, agreement), max(0.0, acceptance + agreement - 1.0)
        joint = acceptance * agreement
        joint += abs(strength) * ((most if strength > 0.0 else least) - joint)
        kept = joint / agreement if agreement > 0.0 else acceptance
        corrected = (acceptance - joint) / (1.0 - agreement) if agreement < 1.0 else acceptance
        return Rates(kept, corrected, acceptance)

    def expected(self, seen: CheckSeen) -> list[float]:
        """How probable acceptance was at each position that was asked for or checked, those before it accepted."""
        if seen.num_asked:
            return self.draft_goes_on(seen.lower, seen.upper, seen.num_asked)
        rates = {below: self.rates(below, seen.lower, seen.upper) for _, below in seen.origins}
        return [rates[below].of(kind) for kind, below in seen.origins]

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


def extended(rates: Sequence[float], length: int) -> list[float]:
    """The first `length` of them, the last one repeated where there are fewer."""
    return [*rates[:length], *[rates[-1]] * (length - len(rates))]
