"""A request that is unlike the others gets a plan of its own, and one that is like them does not."""

import itertools
import random

import pytest

from kvstate.protocol import Profile, Speculation
from router.own_rates import MOST_SHIFT, OwnRates, shifted
from router.planning import Planning, RequestObserver, RouterSettings
from router.stats import RouterStats
from router.table import PairEstimate, TableSnapshot

PAIR = ("drafter", "target")


def rounds(own: OwnRates, rng: random.Random, acceptance: float, expected: float, count: int) -> None:
    for _ in range(count):
        accepted = 0
        while accepted < 4 and rng.random() < acceptance:
            accepted += 1
        own.observe(PAIR, accepted, [expected] * 4)
        own.end_round()


@pytest.mark.parametrize(
    ("acceptance", "expected", "shift"),
    [(0.5, 0.5, 0.0), (0.1, 0.5, -2.25), (0.9, 0.5, 2.25), (0.68, 0.5, 0.75), (0.02, 0.9, -MOST_SHIFT)],
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
    own.observe(PAIR, 1, [0.5] * 2)
    own.end_round()
    assert not own.shifts
    rounds(own, random.Random(1), 0.0, 0.5, 30)
    assert own.shifts == ((PAIR, -MOST_SHIFT),)
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
    planning = Planning(RouterSettings(("drafter", "target")), itertools.count().__next__, RouterStats())
    planning.add_model("drafter", Profile(4.0))
    planning.add_model("target", Profile(20.0, 0.5))
    good, bad = RequestObserver(planning, OwnRates()), RequestObserver(planning, OwnRates())
    for _ in range(40):
        for observer, accepted in ((good, 4), (bad, 0)):
            observer.checked(*PAIR, 4, accepted, 4)
            observer.own.end_round()
    models = ("drafter", "target")
    assert planning.plan(models, Speculation(), good.own.shifts).chain == models
    assert planning.plan(models, Speculation(), bad.own.shifts).chain == ("target",)


def test_plans_are_bounded_however_requests_differ() -> None:
    planning = Planning(RouterSettings(("drafter", "target")), lambda: 0.0, RouterStats())
    for name in ("drafter", "target"):
        planning.add_model(name, Profile(1.0))
    for i in range(100):
        planning.plan(("drafter", "target"), Speculation(), ((PAIR, 0.01 * i),))
    assert len(planning._plans) <= 33
