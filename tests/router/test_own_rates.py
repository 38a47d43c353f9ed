"""A request that is unlike the others gets a plan of its own, and one that is like them does not."""

import itertools
import random

import pytest

from kvstate.protocol import Profile, Speculation
from router.acceptance import Dispersion
from router.checks import CheckSeen
from router.own_rates import MOST_SHIFT, OwnRates, shifted
from router.planning import Planning
from router.settings import RouterSettings
from router.snapshot import PairEstimate, TableSnapshot
from router.stats import RouterStats
from router.table import RouterTable

PAIR = ("drafter", "target")


def planning_of(drafter: Profile, target: Profile) -> Planning:
    """Its clock moves on with every look, so that no snapshot is old."""
    planning = Planning(RouterSettings(PAIR), itertools.count().__next__, RouterStats())
    planning.add_model("drafter", drafter)
    planning.add_model("target", target)
    return planning


def rounds(own: OwnRates, rng: random.Random, acceptance: float, expected: float, count: int) -> None:
    for _ in range(count):
        accepted = 0
        while accepted < 4 and rng.random() < acceptance:
            accepted += 1
        own.observe(PAIR, accepted, [expected] * 4, 6.0)
        own.end_round()


@pytest.mark.parametrize(
    ("acceptance", "expected", "shift"),
    [(0.5, 0.5, 0.0), (0.1, 0.5, -2.25), (0.9, 0.5, 2.25), (0.68, 0.5, 0.75), (0.02, 0.99, -MOST_SHIFT)],
)
def test_the_difference_is_learned_in_log_odds(acceptance: float, expected: float, shift: float) -> None:
    errors = []
    for seed in range(20):
        own = OwnRates()
        rounds(own, random.Random(seed), acceptance, expected, 60)
        errors.append(abs(dict(own.shifts).get(PAIR, 0.0) - shift))
    assert sum(errors) / 20 <= 0.6


def test_a_few_positions_change_nothing_and_what_is_not_seen_again_fades() -> None:
    own = OwnRates()
    own.observe(PAIR, 1, [0.5] * 2, 6.0)
    own.end_round()
    assert not own.shifts
    rounds(own, random.Random(1), 0.0, 0.5, 30)
    assert dict(own.shifts)[PAIR] < -1.5
    for _ in range(200):
        own.end_round()
    assert not own.shifts


def test_shifting_moves_the_rates_of_the_pair_and_of_no_other() -> None:
    other = PairEstimate("b", "target", 0.5, 0.5, 9)
    snapshot = TableSnapshot({}, {PAIR: PairEstimate(*PAIR, 0.5, 0.5, 9, (0.5, 0.9)), ("b", "target"): other})
    changed: dict[tuple[str, str], PairEstimate] = dict(shifted(snapshot, ((PAIR, 0.75),)).pairs)
    assert changed[PAIR].acceptance == pytest.approx(0.679, abs=1e-3)
    assert changed[PAIR].goes_on == pytest.approx((0.679, 0.950), abs=1e-3)
    assert changed["b", "target"] == other


def test_a_request_whose_drafts_fail_stops_drafting_while_others_go_on() -> None:
    planning = planning_of(Profile(4.0), Profile(20.0, 0.5))
    for _ in range(4):
        good, bad = planning.observer(OwnRates()), planning.observer(OwnRates())
        for _ in range(40):
            for observer, accepted in ((good, 4), (bad, 0)):
                observer.checked(CheckSeen(*PAIR, 4, accepted, 4))
                observer.own.end_round()
        for observer in (good, bad):
            planning.record_request(observer.own)
    models = ("drafter", "target")
    assert planning.plan(models, Speculation(), good.own).chain == models
    assert planning.plan(models, Speculation(), bad.own).chain == ("target",)


@pytest.mark.parametrize(("spread", "least", "most"), [(0.0, 80.0, 200.0), (0.3, 4.0, 12.0)])
def test_a_request_is_believed_as_far_as_requests_differ(spread: float, least: float, most: float) -> None:
    rng, dispersion = random.Random(5), Dispersion()
    for _ in range(100):
        rate = 0.5 + rng.choice((-spread, spread))
        dispersion.observe(60, sum(rng.random() < rate for _ in range(60)))
    assert least <= dispersion.prior_positions <= most


@pytest.mark.parametrize("length", [20, 300, 2000])
def test_long_requests_that_differ_are_believed_as_well(length: int) -> None:
    rng, dispersion = random.Random(5), Dispersion()
    for _ in range(100):
        rate = rng.choice((0.2, 0.8))
        dispersion.observe(length, sum(rng.random() < rate for _ in range(length)))
    assert dispersion.prior_positions <= 15.0


def test_requests_that_differ_are_no_change_of_the_pair() -> None:
    rng, table = random.Random(5), RouterTable()
    for level, name in enumerate(PAIR, 1):
        table.add_model(name, level, Profile(1.0))
    rates = []
    for _ in range(60):
        rate, accepted = rng.choice((0.2, 0.8)), 0
        for _ in range(60):
            hit = int(rng.random() < rate)
            table.observe_check(CheckSeen(*PAIR, 1, hit, num_asked=1))
            accepted += hit
        table.observe_request(PAIR, 60, accepted)
        rates.append(table.snapshot().acceptance(*PAIR))
    assert sum(abs(rate - 0.5) for rate in rates[20:]) / 40 < 0.1


def test_a_request_that_suits_a_pair_does_not_speak_for_all() -> None:
    """One in ten does, and goes on with it for long: the others are not expected to."""
    planning = planning_of(Profile(1.0), Profile(1.0))
    rng = random.Random(3)
    for number in range(80):
        suits, observer = number % 10 == 0, planning.observer(OwnRates())
        for _ in range(200 if suits else 12):
            observer.checked(CheckSeen(*PAIR, 1, int(rng.random() < (0.95 if suits else 0.2)), 1))
            observer.own.end_round()
        planning.record_request(observer.own)
    assert planning.table.snapshot().acceptance(*PAIR) < 0.45


def test_where_requests_are_alike_all_of_a_long_one_is_learned() -> None:
    planning = planning_of(Profile(1.0), Profile(1.0))
    rng = random.Random(3)
    for _ in range(40):
        observer = planning.observer(OwnRates())
        for _ in range(100):
            observer.checked(CheckSeen(*PAIR, 1, int(rng.random() < 0.7), 1))
        planning.record_request(observer.own)
    assert planning.table.snapshot().pairs[PAIR].samples > 2500


def test_a_level_that_joins_late_must_be_worth_what_it_computes_first() -> None:
    planning = planning_of(Profile(4.0, 0.5), Profile(20.0, 0.5))
    observer = planning.observer(OwnRates())
    for _ in range(100):
        observer.checked(CheckSeen(*PAIR, 4, 2, 4))
    for num_rows, chain in ((0, PAIR), (128, PAIR), (4096, PAIR[1:])):
        missing = (("drafter", num_rows),) if num_rows else ()
        plan = planning.plan(PAIR, Speculation(), OwnRates(), missing)
        assert plan.chain == chain
        joined = planning.plan(PAIR, Speculation(), OwnRates())
        if num_rows == 128:
            assert plan.predicted_ms_per_token == pytest.approx(joined.predicted_ms_per_token + 128 * 0.5 / 64)
