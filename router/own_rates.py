"""How a request's own text differs from what the table says of all: some are drafted easily, some not at all. Pure.

Per pair of levels, the acceptances that this request saw are held against those that the table expected of the same
positions. The difference, in log-odds, shifts the table's rates for this request's plans; where requests hardly differ,
little of it is believed. It fades with a half-life of 34 rounds, seen or unseen, so that a chain given up is tried
again; and it is rounded, so that requests share plans.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from router.acceptance import log_odds, shift_rate
from router.keys import EVERY, Context, Pair
from router.snapshot import ALL_ALIKE, TableSnapshot
from router.subjects import NO_WORDS, Words

Shifts = tuple[tuple[Pair, float], ...]
"""In log-odds, by pair, sorted; pairs that are as the table says are not named."""

Missing = tuple[tuple[str, int], ...]
"""Models that have not read the sequence, and how many rows they would have to compute."""

JOIN_TOKENS = 64
"""Over how many tokens a level that joins late has to earn what it must compute first."""

FADE = 0.98
STEP = 0.75
MOST_SHIFT = 4.5
_TELLING = 3.0


@dataclass(slots=True)
class Seen:
    """Positions examined and accepted in all; `lately`, fading: those, and how many the table expected to be accepted.

    `prior_positions` as in `PairEstimate`.
    """

    prior_positions: float = 0.0
    positions: float = 0.0
    accepted: float = 0.0
    lately: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def add(self, positions: float, accepted: float, expected: float) -> None:
        self.positions += positions
        self.accepted += accepted
        self.lately = [old + new for old, new in zip(self.lately, (positions, accepted, expected), strict=True)]

    def fade(self, share: float) -> None:
        self.lately = [share * count for count in self.lately]

    def shift(self) -> float:
        """Log-odds of the own rate over the expected one."""
        positions, accepted, expected = self.lately
        if not positions:
            return 0.0
        rate = expected / positions
        own = (accepted + rate * self.prior_positions) / (positions + self.prior_positions)
        return log_odds(own) - log_odds(rate)


@dataclass(slots=True, eq=False)
class OwnRates:
    """Of one request, for which it stands where requests are told apart; `shifts` are those of the present round,
    `probed_len` the output's length at each model's last probe; `words` as in router/subjects.py.
    """

    context: Context = EVERY
    words: Words = field(default_factory=lambda: NO_WORDS)
    shifts: Shifts = ()
    probed_len: dict[str, int] = field(default_factory=dict)
    _seen: dict[Pair, Seen] = field(default_factory=dict)

    def observe(self, pair: Pair, num_accepted: int, expected: Sequence[float], prior_positions: float) -> None:
        """`expected[j]`: the table's rate at position j, for all that were checked (or asked for, of one draft)."""
        examined = expected[: num_accepted + 1]
        seen = self._seen.setdefault(pair, Seen())
        seen.prior_positions = prior_positions
        seen.add(len(examined), num_accepted, sum(examined))

    def is_telling(self, pair: Pair) -> bool:
        """Whether what this request shows still says something about others.

        A request goes on with a pair for long because its own text suits it: were all of that counted, the pair would
        seem as good for every new request.
        """
        seen = self._seen[pair]
        return seen.positions < _TELLING * seen.prior_positions or seen.prior_positions >= ALL_ALIKE

    def tells_of(self, drafter: str) -> bool:
        """The same of its drafts."""
        return all(self.is_telling(pair) for pair in self._seen if pair[0] == drafter)

    def end_round(self) -> None:
        for seen in self._seen.values():
            seen.fade(FADE)
        rounded = ((pair, STEP * round(seen.shift() / STEP)) for pair, seen in sorted(self._seen.items()))
        self.shifts = tuple((pair, max(-MOST_SHIFT, min(MOST_SHIFT, shift))) for pair, shift in rounded if shift)

    def lately(self, pair: Pair) -> tuple[float, float]:
        """Positions examined and accepted, those of old rounds fading."""
        seen = self._seen.get(pair)
        return (seen.lately[0], seen.lately[1]) if seen is not None else (0.0, 0.0)

    def positions(self, pair: Pair) -> float:
        """That were examined."""
        return self._seen[pair].positions if pair in self._seen else 0.0

    def totals(self) -> Iterator[tuple[Pair, float, float]]:
        """Pair, positions examined and accepted: over the whole request."""
        for pair, seen in self._seen.items():
            yield pair, seen.positions, seen.accepted


def shifted(snapshot: TableSnapshot, shifts: Shifts, missing: Missing = ()) -> TableSnapshot:
    """The table as it is for a request that differs from the others by `shifts`, and of which models lack rows."""
    pairs = dict(snapshot.pairs)
    for pair, shift in shifts:
        estimate = pairs[pair]
        goes_on = tuple(shift_rate(rate, shift) for rate in estimate.goes_on)
        pairs[pair] = replace(estimate, acceptance=shift_rate(estimate.acceptance, shift), goes_on=goes_on)
    models = dict(snapshot.models)
    for name, num_rows in missing:
        models[name] = replace(models[name], join_ms=num_rows * models[name].per_token_ms / JOIN_TOKENS)
    return replace(snapshot, models=models, pairs=pairs)
