"""The planner against the oracle, against a simulation of independent positions, and its choices in clear cases."""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from benchmarks.oracle import Level, best_by_length, ms_per_token
from router.checks import Kind, origins_of
from router.plan import Plan, Tail
from router.planner import Found, Planner
from router.prediction import Prediction
from router.renewal import Rates
from router.snapshot import ModelCost, PairEstimate, TableSnapshot

NAMES = ("a", "b", "c", "d", "e", "f")


def fastest(snapshot: TableSnapshot, models: Sequence[str], max_window: int) -> Plan:
    return Planner(snapshot, max_window).choose(models)


def snapshot_of(levels: list[Level]) -> TableSnapshot:
    """The table that shared errors lead to: acceptance 1 − |a_i − a_j|, errors of dearer levels among the others'."""
    models = {
        name: ModelCost(name, i + 1, x.base_ms, x.per_token_ms, x.per_sequence_ms, x.hop_ms)
        for i, (name, x) in enumerate(zip(NAMES, levels, strict=False))
    }
    pairs = {}
    for i, j in combinations(range(len(levels)), 2):
        acceptance = 1 - abs(levels[i].agreement - levels[j].agreement)
        pairs[NAMES[i], NAMES[j]] = PairEstimate(NAMES[i], NAMES[j], acceptance, 1 - acceptance, 1000)
    return TableSnapshot(models, pairs, dict.fromkeys(combinations(NAMES[: len(levels)], 3), -1.0))


def random_levels(rng: random.Random, num_levels: int) -> list[Level]:
    agreements = [*sorted(rng.uniform(0.3, 0.97) for _ in range(num_levels - 1)), 1.0]
    bases = [*sorted(rng.uniform(0.5, 25.0) for _ in range(num_levels - 1)), rng.uniform(25.0, 60.0)]
    return [
        Level(base, agreement, rng.uniform(0, 0.03) * base, rng.uniform(0, 0.03) * base, rng.uniform(0.1, 1.0))
        for base, agreement in zip(bases, agreements, strict=True)
    ]


def predict_plan(snapshot: TableSnapshot, plan: Plan) -> float:
    return Planner(snapshot, 16).predict(plan.chain, plan.windows, plan.tail)


def predict(snapshot: TableSnapshot, chain: Sequence[str], windows: Sequence[int]) -> float:
    return predict_plan(snapshot, Plan(tuple(chain), tuple(windows), 0.0))


def independent_rounds(snapshot: TableSnapshot, chain: list[str], windows: list[int], num_tokens: int) -> float:
    """Plays the rule with a coin per examined token, by its kind: what `predict` claims to compute exactly."""
    rng = random.Random(7)
    elapsed_ms = 0.0

    def produce(level: int) -> list[Kind]:
        nonlocal elapsed_ms
        model = snapshot.models[chain[level]]
        if level == 0:
            elapsed_ms += windows[0] * model.base_ms + model.hop_ms
            return [Kind.EXTENDED] * windows[0]
        held: list[Kind] = []
        while len(held) < windows[level - 1]:
            held += produce(level - 1)
        elapsed_ms += model.base_ms + model.hop_ms
        drafted = snapshot.acceptance(chain[level - 1], chain[level])
        rates = Rates(drafted, drafted, drafted) if level == 1 else snapshot.rates(*chain[level - 2 : level + 1])
        accepted = 0
        while accepted < len(held) and rng.random() < rates.of(held[accepted]):
            accepted += 1
        return [origin.kind for origin in origins_of([""] * len(held), accepted)]

    committed = 0
    while committed < num_tokens:
        committed += len(produce(len(chain) - 1))
    return elapsed_ms / committed


@pytest.mark.parametrize("windows", [[4], [3, 5], [1, 6], [8, 1], [2, 3, 5], [4, 1, 9]])
def test_prediction_is_exact_for_independent_positions(windows: list[int]) -> None:
    levels = [Level(2.0, 0.55), Level(8.0, 0.72), Level(15.0, 0.85), Level(45.0, 1.0)][-len(windows) - 1 :]
    snapshot = snapshot_of(levels)
    chain = list(NAMES[: len(levels)])
    assert predict(snapshot, chain, windows) == pytest.approx(
        independent_rounds(snapshot, chain, windows, 60_000), rel=0.012
    )


def test_prediction_of_best_windows_agrees_with_the_oracle_on_random_tables() -> None:
    rng = random.Random(11)
    errors = []
    for i in range(30):
        levels = random_levels(rng, 2 + i % 3)
        best = Planner(snapshot_of(levels), 8).best(NAMES[: len(levels)])
        oracle = ms_per_token(levels, best.windows, num_tokens=100_000, seed=i)
        errors.append(abs(best.predicted_ms_per_token / oracle - 1))
    print(f"prediction error: median {statistics.median(errors):.2%}, max {max(errors):.2%}")
    assert statistics.median(errors) < 0.005
    assert statistics.quantiles(errors, n=10)[-1] < 0.015
    assert max(errors) < 0.03


def test_the_plan_is_as_fast_as_the_best_that_the_oracle_finds() -> None:
    rng = random.Random(5)
    for levels in (random_levels(rng, 3), random_levels(rng, 3), random_levels(rng, 2)):
        chosen = fastest(snapshot_of(levels), NAMES[: len(levels)], max_window=8)
        members = [levels[NAMES.index(name)] for name in chosen.chain]
        chosen_ms = ms_per_token(members, chosen.windows, num_tokens=20_000, seed=1)
        best = best_by_length(levels, max_window=8, num_tokens=1_500)
        assert chosen_ms <= 1.03 * min(b.ms_per_token for b in best.values())


def test_the_target_alone_when_nobody_agrees() -> None:
    levels = [Level(2.0, 0.02), Level(8.0, 0.02), Level(45.0, 1.0)]
    assert fastest(snapshot_of(levels), NAMES[:3], max_window=16) == Plan(("c",), (), 45.0)


def test_a_level_that_does_not_pay_is_left_out() -> None:
    levels = [Level(1.0, 0.8), Level(30.0, 0.81), Level(40.0, 1.0)]
    assert fastest(snapshot_of(levels), NAMES[:3], max_window=16).chain == ("a", "c")


def test_a_model_without_room_is_not_planned() -> None:
    levels = [Level(1.0, 0.8), Level(5.0, 0.9), Level(40.0, 1.0)]
    assert "a" not in fastest(snapshot_of(levels), ("b", "c"), max_window=16).chain


def test_candidates_name_every_chain_once_and_agree_with_predict() -> None:
    snapshot = snapshot_of([Level(2.0, 0.55), Level(8.0, 0.72), Level(15.0, 0.85), Level(45.0, 1.0)])
    found = Planner(snapshot, 16).candidates(NAMES[:4])
    assert len({p.label for p in found}) == len(found) == 8 + 3
    for p in found:
        assert predict_plan(snapshot, p) == pytest.approx(p.predicted_ms_per_token, rel=1e-4)


@pytest.mark.parametrize(("head", "tail"), [(1, 1), (2, 5), (4, 3)])
def test_a_tail_is_predicted_as_the_oracle_plays_it(head: int, tail: int) -> None:
    levels = [Level(1.0, 0.5, 0.1, 0.0, 0.3), Level(6.0, 0.85, 0.5, 0.0, 1.0), Level(40.0, 1.0, 1.0, 0.0, 1.0)]
    plan = Plan(("b", "c"), (head,), 0.0, tail=Tail("a", tail))
    played = ms_per_token(levels[1:], [head], num_tokens=200_000, tail=(levels[0], tail))
    assert predict_plan(snapshot_of(levels), plan) == pytest.approx(played, rel=0.01)


def test_a_tail_is_taken_where_it_pays() -> None:
    cheap, good, target = Level(0.05, 0.6), Level(3.0, 0.9, hop_ms=8.0), Level(45.0, 1.0)
    best = fastest(snapshot_of([cheap, good, target]), NAMES[:3], max_window=16)
    assert best.label == ("b+a", "c")
    assert best.tail is not None
    assert best.drafters == ("a", "b")
    useless = fastest(snapshot_of([replace(cheap, agreement=0.02), good, target]), NAMES[:3], max_window=16)
    assert useless.label == ("b", "c")


def test_a_tail_stops_where_its_own_part_would_be_too_seldom_right() -> None:
    snapshot = snapshot_of([Level(0.05, 0.6), Level(8.0, 0.8), Level(45.0, 1.0, per_token_ms=2.0)])
    planner = Planner(snapshot, 16)
    plan = planner.with_stop(planner.best_tail(("b", "c"), (2,), "a"))
    assert plan.tail is not None
    assert plan.tail.stop_below == pytest.approx(plan.stop_below / 0.8**2)


def test_a_search_that_begins_at_former_windows_finds_as_good_ones() -> None:
    rng = random.Random(3)
    for _ in range(5):
        found: Found = {}
        levels = random_levels(rng, 5)
        Planner(snapshot_of(levels), 16, found).candidates(NAMES[:5])
        changed = snapshot_of([*(replace(level, agreement=0.9 * level.agreement) for level in levels[:-1]), levels[-1]])
        cold, warm = (Planner(changed, 16, begin).candidates(NAMES[:5])[0] for begin in (None, found))
        assert warm.predicted_ms_per_token == pytest.approx(cold.predicted_ms_per_token, rel=0.005)


@pytest.mark.parametrize("seed", range(20))
def test_times_of_all_windows_at_once_are_those_of_each(seed: int) -> None:
    rng = random.Random(seed)
    costs = {
        name: ModelCost(
            name, level, rng.uniform(1.0, 40.0), rng.random(), rng.random(), rng.random(), queue_batches=rng.random(),
            sharing=rng.uniform(1.0, 8.0), draft_continues=(0.9, 0.8, 1.0) if seed % 2 else (), join_ms=rng.random(),
        )
        for level, name in enumerate(("small", "target"), 1)
    }  # fmt: skip
    goes_on = (0.8, 0.85, 0.7) if seed % 3 else ()
    pairs = {("small", "target"): PairEstimate("small", "target", 0.7, 0.3, 10, goes_on)}
    prediction = Prediction(TableSnapshot(costs, pairs))
    for window, times in enumerate(prediction.by_window(("small", "target"), 12), 1):
        plan = Plan(("small", "target"), (window,), 0.0)
        assert times.in_turn_ms == pytest.approx(prediction.ms_per_token(plan))
        assert times.ahead_ms == pytest.approx(prediction.ms_per_token(replace(plan, goes_on=True)))
        assert times.keeps_step == prediction.keeps_step(plan)


def test_windows_search_reaches_the_exhaustive_optimum() -> None:
    snapshot = snapshot_of([Level(2.0, 0.55), Level(8.0, 0.72), Level(45.0, 1.0)])
    best = Planner(snapshot, 8).best(NAMES[:3])
    every = min(predict(snapshot, NAMES[:3], (v, w)) for v in range(1, 9) for w in range(1, 9))
    assert best.predicted_ms_per_token <= 1.005 * every


def test_no_window_longer_than_what_remains() -> None:
    snapshot = snapshot_of([Level(0.1, 0.99), Level(40.0, 1.0)])
    assert fastest(snapshot, NAMES[:2], max_window=16).windows[0] > 8
    assert fastest(snapshot, NAMES[:2], max_window=3).windows == (3,)


def test_a_small_gain_does_not_change_the_plan() -> None:
    snapshot = snapshot_of([Level(2.0, 0.8), Level(40.0, 1.0)])
    best = fastest(snapshot, NAMES[:2], max_window=16)
    close = Plan(best.chain, (best.windows[0] + 1,), 0.0)
    far = Plan(("b",), (), 0.0)
    planner = Planner(snapshot, 16)
    kept = planner.choose(NAMES[:2], close)
    assert kept.windows == close.windows
    assert kept.predicted_ms_per_token == predict(snapshot, close.chain, close.windows)
    assert planner.choose(NAMES[:2], far) == best
    assert planner.choose(NAMES[:2], Plan(("gone", "b"), (3,), 1.0)) == best


def busy_of(snapshot: TableSnapshot, plan: Plan) -> float:
    return Prediction(snapshot).busy_ms(plan)


def test_with_a_target_for_its_time_a_plan_is_as_light_as_that_allows() -> None:
    """Rows cost the target's time here: drafts are fast for one request and take room from others."""
    snapshot = snapshot_of([Level(2.0, 0.6), Level(30.0, 1.0, per_token_ms=10.0)])
    snapshot = replace(snapshot, models={name: replace(cost, sharing=8.0) for name, cost in snapshot.models.items()})
    planner = Planner(snapshot, 16)
    plans = {plan.chain: plan for plan in planner.candidates(NAMES[:2])}
    alone, drafted = plans["b",], plans["a", "b"]
    assert busy_of(snapshot, alone) < busy_of(snapshot, drafted)
    light = planner.choose(NAMES[:2], slo_ms_per_token=2.0 * alone.predicted_ms_per_token)
    assert light.chain == ("b",)
    least = min(plan.predicted_ms_per_token for plan in plans.values())
    assert planner.choose(NAMES[:2], slo_ms_per_token=0.5 * least).predicted_ms_per_token == least
    missed = replace(drafted, windows=(16,))
    assert planner.choose(NAMES[:2], missed, slo_ms_per_token=2.0 * alone.predicted_ms_per_token).chain == ("b",)


def test_a_token_s_share_of_each_model_is_counted() -> None:
    """By hand: every draft right. 2 of a, one check by b of 3 rows, then the target with 4 rows for 4 tokens."""
    snapshot = snapshot_of([Level(1.0, 1.0), Level(4.0, 1.0, 0.5), Level(20.0, 1.0, 1.0)])
    plan = Plan(("a", "b", "c"), (2, 3), 0.0)
    assert busy_of(snapshot, plan) == pytest.approx((20.0 + 4.0) / 4.0)
    half = replace(snapshot, models={**snapshot.models, "c": replace(snapshot.models["c"], sharing=10.0)})
    assert busy_of(half, plan) == pytest.approx((2.0 + 4.0) / 4.0)
    assert busy_of(half, Plan(("c",), (), 0.0)) == pytest.approx(3.0)


def test_planning_time_is_printed() -> None:
    rng = random.Random(2)
    for num_levels in (4, 6):
        took_ms = []
        for _ in range(12):
            snapshot = snapshot_of(random_levels(rng, num_levels))
            started = time.perf_counter()
            found = fastest(snapshot, NAMES[:num_levels], max_window=16)
            took_ms.append((time.perf_counter() - started) * 1e3)
            assert found.chain[-1] == NAMES[num_levels - 1]
        print(f"{num_levels} levels: planning {statistics.median(took_ms):.1f} ms, at most {max(took_ms):.1f} ms")


def test_those_who_are_waited_for_bring_as_many_rows() -> None:
    """Two groups of 32 take turns at a target whose rows all cost: a draft looks cheap only where the others' do not
    count.
    """
    snapshot = snapshot_of([Level(2.0, 0.6), Level(20.0, 1.0, per_token_ms=6.0)])
    target = replace(snapshot.models["b"], sharing=32.0, queue_ms=212.0, queue_batches=1.0)
    planned = fastest(replace(snapshot, models={**snapshot.models, "b": target}), NAMES[:2], max_window=16)
    assert planned.chain == ("b",)
    assert planned.predicted_ms_per_token == pytest.approx(424.0)


def test_a_middle_level_costs_the_waiting_of_requests_out_of_step() -> None:
    snapshot = snapshot_of([Level(2.0, 0.55), Level(15.0, 0.85), Level(45.0, 1.0)])
    assert fastest(snapshot, NAMES[:3], max_window=16).chain == ("a", "b", "c")
    waiting = {name: replace(cost, uneven_queue_batches=0.25) for name, cost in snapshot.models.items()}
    crowded = replace(snapshot, models=waiting)
    assert len(fastest(crowded, NAMES[:3], max_window=16).chain) == 2
    assert predict(crowded, ("a", "c"), (4,)) == predict(snapshot, ("a", "c"), (4,))
    assert predict(crowded, NAMES[:3], (2, 4)) > 1.1 * predict(snapshot, NAMES[:3], (2, 4))


def test_a_draft_that_takes_longer_than_the_checker_waits_falls_out_of_step() -> None:
    snapshot = snapshot_of([Level(2.0, 0.55), Level(15.0, 0.85), Level(45.0, 1.0, hop_ms=1.0)])
    prediction = Prediction(snapshot)
    for chain, window, keeps_step in ((("b", "c"), 2, True), (("b", "c"), 3, False), (("a", "c"), 16, True)):
        assert prediction.keeps_step(Plan(chain, (window,), 0.0)) == keeps_step, (chain, window)
    assert not prediction.keeps_step(Plan(("a", "b", "c"), (1, 1), 0.0))
    assert prediction.keeps_step(Plan(("c",), (), 0.0))
    assert not prediction.keeps_step(Plan(("b", "c"), (2,), 0.0, tail=Tail("a", 8)))
