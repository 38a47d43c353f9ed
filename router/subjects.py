"""What kinds of requests there are, told apart by which drafters suit them: a mixture learned while serving. Pure.

A subject is a set of rates, one per drafter: how often its tokens are accepted in requests of that subject. Subjects
are not given and have no names; each request that ends joins the one that explains it best, or begins one where none
does (a Dirichlet process, decided at once). So a few positions of a few drafters tell of those that were never tried in
a request: where one expert does well, the others of its subject do. And the prompt's words, by which subjects differ
too, tell before any position does; what positions say comes to outweigh them.
Units: positions. Letters: S subjects, D drafters, W hashed words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import betaln

from router.learned import SubjectsLearned

MOST_SUBJECTS = 16
NEW_REQUESTS = 0.5
"""How many requests' worth of likelihood a subject has that was never seen."""

BASE_POSITIONS = 3.0
"""How many positions of a subject it is worth what the table says of all requests."""

OWN_POSITIONS = 16.0
"""How many of its own positions a request must show to be believed as much as its subject."""

MOST_POSITIONS = 40.0
"""Of one drafter in one request: more would be believed to say more of its subject than they do."""

NUM_WORDS = 1024
END_TOKENS, MOST_IN_WORD = 48, 3
"""Words are the runs of up to so many tokens among so many at either end of a prompt, hashed."""

WORD_WEIGHT, MOST_OF_WORDS = 0.25, 6.0
"""Words come together, so each is believed in part only; and all of them no more than so much log-likelihood."""

LEAST_COUNT = 0.05
"""Of a word in a subject, to be worth remembering over a restart."""

FADE = 0.995
"""Of what is known, per request that ends."""

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.int64]

NO_WORDS: Words = np.zeros(0, np.int64)

Evidence = Mapping[str, tuple[float, float]]
"""By drafter: positions of one request at which it was tried, and those at which its token was accepted."""


@dataclass(frozen=True, slots=True)
class Suits:
    """How often a drafter's tokens are expected to be accepted in a request, and the standard deviation of that."""

    acceptance: float
    deviation: float


def words_of(prompt: Sequence[int]) -> Words:
    """Of a prompt's tokens, each once."""
    ends = [prompt] if len(prompt) <= 2 * END_TOKENS else [prompt[:END_TOKENS], prompt[-END_TOKENS:]]
    runs = (
        tuple(end[first : first + length])
        for end in ends
        for length in range(1, MOST_IN_WORD + 1)
        for first in range(len(end) - length + 1)
    )
    return np.array(sorted({hash(run) % NUM_WORDS for run in runs}), np.int64)


class Subjects:
    """Over the drafters of one level, which may become more."""

    def __init__(self, drafters: Sequence[str] = ()) -> None:
        self._drafters: dict[str, int] = {name: column for column, name in enumerate(drafters)}
        self._requests: Floats = np.zeros(0)
        self._tried: Floats = np.zeros((0, len(drafters)))
        self._right: Floats = np.zeros((0, len(drafters)))
        self._words: Floats = np.zeros((0, NUM_WORDS))

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def learned(self) -> SubjectsLearned:
        words = [{int(w): float(row[w]) for w in np.flatnonzero(row > LEAST_COUNT)} for row in self._words.round(2)]
        requests, tried, right = (known.round(2).tolist() for known in (self._requests, self._tried, self._right))
        return SubjectsLearned(list(self._drafters), requests, tried, right, words)

    @classmethod
    def restored(cls, learned: SubjectsLearned) -> "Subjects":
        subjects, num_subjects = cls(learned.drafters), len(learned.requests)
        shape = (num_subjects, len(learned.drafters))
        subjects._requests = np.array(learned.requests, float)
        subjects._tried = np.array(learned.tried, float).reshape(shape)
        subjects._right = np.minimum(np.array(learned.right, float).reshape(shape), subjects._tried)
        subjects._words = np.zeros((num_subjects, NUM_WORDS))
        for row, words in zip(subjects._words, learned.words, strict=True):
            for word, count in words.items():
                row[word % NUM_WORDS] = count
        return subjects

    def suits(self, base: Mapping[str, float], evidence: Evidence, words: Words = NO_WORDS) -> dict[str, Suits]:
        """Of the drafters in `base`, which says how often their tokens are accepted over all requests."""
        self._know(base)
        rates, (tried, right) = self._rates(base), self._row(evidence)
        fits = np.log(rates) @ right + np.log1p(-rates) @ (tried - right)
        fits += self._likely(words)
        shares = np.exp(fits - fits.max())
        shares /= shares.sum()
        means = shares @ rates
        spreads = shares @ (rates - means) ** 2
        own = (right + OWN_POSITIONS * means) / (tried + OWN_POSITIONS)
        variances = spreads + means * (1.0 - means) / (tried + OWN_POSITIONS)
        return {
            name: Suits(float(own[column]), float(np.sqrt(variances[column])))
            for name, column in self._drafters.items()
            if name in base
        }

    def learn(self, base: Mapping[str, float], evidence: Evidence, words: Words = NO_WORDS) -> None:
        """A request ended."""
        self._know(base)
        tried, right = self._row(evidence)
        if not tried.any():
            return
        counted = np.minimum(tried, MOST_POSITIONS)
        right, tried = right * counted / np.maximum(tried, 1e-9), counted
        prior = self._base(base)
        a = np.vstack([self._right, np.zeros_like(tried)]) + BASE_POSITIONS * prior
        b = np.vstack([self._tried - self._right, np.zeros_like(tried)]) + BASE_POSITIONS * (1.0 - prior)
        fits = self._likely(words) + (betaln(a + right, b + tried - right) - betaln(a, b)).sum(axis=1)
        best = int(fits.argmax())
        for known in (self._requests, self._tried, self._right, self._words):
            np.multiply(known, FADE, out=known)
        if best == len(self):
            best = self._begin()
        self._requests[best] += 1.0
        self._tried[best] += tried
        self._right[best] += right
        self._words[best, words] += 1.0

    def _likely(self, words: Words) -> Floats:
        """[S + 1]: log of how many requests each subject had, and of how much its prompts look like this one."""
        counts = np.append(self._requests, NEW_REQUESTS)
        if not len(words) or not len(self):
            return _log(counts)
        overall = (self._words[:, words].sum(axis=0) + 1.0) / (self._requests.sum() + 2.0)
        shares = (self._words[:, words] + overall) / (self._requests[:, None] + 1.0)
        fits = WORD_WEIGHT * _log(shares / overall).sum(axis=1)
        likely: Floats = _log(counts) + np.append(np.clip(fits, -MOST_OF_WORDS, MOST_OF_WORDS), 0.0)
        return likely

    def _begin(self) -> int:
        """A new subject; where there are too many, in place of the one with the fewest requests."""
        if len(self) < MOST_SUBJECTS:
            nothing = np.zeros((1, len(self._drafters)))
            self._requests = np.append(self._requests, 0.0)
            self._tried, self._right = np.vstack([self._tried, nothing]), np.vstack([self._right, nothing])
            self._words = np.vstack([self._words, np.zeros((1, NUM_WORDS))])
            return len(self) - 1
        fewest = int(self._requests.argmin())
        for known in (self._requests, self._tried, self._right, self._words):
            known[fewest] = 0.0
        return fewest

    def _rates(self, base: Mapping[str, float]) -> Floats:
        """[S + 1, D]; the last one of a subject that was never seen."""
        prior = self._base(base)
        known = (self._right + BASE_POSITIONS * prior) / (self._tried + BASE_POSITIONS)
        rates: Floats = np.clip(np.vstack([known, prior]), 0.01, 0.99)
        return rates

    def _base(self, base: Mapping[str, float]) -> Floats:
        rates = np.full(len(self._drafters), 0.5)
        for name, rate in base.items():
            rates[self._drafters[name]] = min(0.99, max(0.01, rate))
        return rates

    def _row(self, evidence: Evidence) -> tuple[Floats, Floats]:
        tried, right = np.zeros(len(self._drafters)), np.zeros(len(self._drafters))
        for name, (positions, accepted) in evidence.items():
            if name in self._drafters:
                tried[self._drafters[name]], right[self._drafters[name]] = positions, accepted
        return tried, right

    def _know(self, names: Mapping[str, float]) -> None:
        for name in names:
            if name not in self._drafters:
                self._drafters[name] = len(self._drafters)
                nothing = np.zeros((len(self), 1))
                self._tried, self._right = np.hstack([self._tried, nothing]), np.hstack([self._right, nothing])


def _log(values: Floats) -> Floats:
    logarithms: Floats = np.log(values)
    return logarithms
