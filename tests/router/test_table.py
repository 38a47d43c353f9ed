"""The table against streams with known costs and rates: it converges, withstands outliers and follows changes. And
probing.
"""

import random
import statistics
from dataclasses import replace

import pytest

from kvstate.protocol import Profile, Speculation, Timing, Top
from router.checks import CheckSeen, Kind, Origin
from router.own_rates import OwnRates
from router.plan import Plan
from router.planning import Planning
from router.probing import ProbeBudget, ProbePlan, choose_probe
from router.settings import RouterSettings
from router.snapshot import PairEstimate, TableSnapshot
from router.stats import RouterStats
from router.table import RouterTable
from router.table_view import as_rows


def table_of(*names: str) -> RouterTable:
    table = RouterTable()
    for level, name in enumerate(names, start=1):
        table.add_model(name, level, Profile(base_ms=10.0))
    return table


def timing(base: float, token: float, sequence: float, batches: int, rows: int, sequences: int) -> Timing:
    return Timing(batches, rows, sequences, (base * batches + token * rows + sequence * sequences) / 1e3, 0.0)


def test_latency_is_recovered_from_sums_over_batches() -> None:
    table, rng = table_of("m"), random.Random(1)
    for _ in range(300):
        batches = rng.randint(1, 6)
        sequences = batches * rng.randint(1, 4)
        sums = timing(4.0, 0.5, 0.25, batches, sequences * rng.randint(1, 8), sequences)
        table.observe_timing("m", "r", sums, sums.busy_s + 0.0006)
    cost = table.snapshot().models["m"]
    assert (cost.base_ms, cost.per_token_ms, cost.per_sequence_ms) == pytest.approx((4.0, 0.5, 0.25), abs=0.1)
    assert cost.hop_ms == pytest.approx(0.6, abs=1e-6)
    assert cost.sharing == pytest.approx(2.5, abs=0.8)


def test_one_stream_predicts_its_own_batches_and_outliers_do_not_pull() -> None:
    table, rng = table_of("m"), random.Random(2)
    for i in range(200):
        rows = rng.randint(1, 9)
        sums = timing(40.0, 0.2, 0.0, 1, rows, 1)
        slow = Timing(1, rows, 1, sums.busy_s * (20 if i % 25 == 24 else 1), 0.0)
        table.observe_timing("m", "r", slow, slow.busy_s)
    cost = table.snapshot().models["m"]
    assert cost.batch_ms(5.0) == pytest.approx(41.0, rel=0.08)
    assert min(cost.base_ms, cost.per_token_ms, cost.per_sequence_ms) >= 0.0


def test_batches_of_one_row_say_little_about_a_row() -> None:
    """Slower or faster than profiled: the base is, and more rows still cost about what the profile says."""
    table = RouterTable()
    table.add_model("m", 1, Profile(base_ms=12.0, per_token_ms=1.0))
    for factor in (1.25, 0.8):
        for _ in range(200):
            sums = timing(12.0 * factor, 1.0 * factor, 0.0, 1, 1, 1)
            table.observe_timing("m", "r", sums, sums.busy_s)
        cost = table.snapshot().models["m"]
        assert cost.batch_ms(1.0) == pytest.approx(13.0 * factor, rel=0.07)
        assert cost.batch_ms(9.0) == pytest.approx(13.0 * factor + 8.0, rel=0.1)


def test_two_slow_batches_in_a_row_are_no_new_speed() -> None:
    table = table_of("m")
    for slow in [1.0] * 50 + [2.5] * 2:
        sums = timing(10.0 * slow, 0.0, 0.0, 1, 1, 1)
        table.observe_timing("m", "r", sums, sums.busy_s)
    assert table.snapshot().models["m"].batch_ms(1.0) < 11.0


def test_a_model_three_times_slower_is_noticed_within_64_messages() -> None:
    table = table_of("m")
    for base, count in ((10.0, 200), (30.0, 64)):
        for _ in range(count):
            sums = timing(base, 0.0, 0.0, 4, 4, 4)
            table.observe_timing("m", "r", sums, sums.busy_s)
    assert table.snapshot().models["m"].batch_ms(1.0) > 22.0


def test_a_probe_tells_of_a_faster_model_and_not_of_a_slower_one() -> None:
    table = table_of("m")
    for busy_s in (0.030, 0.004):
        for _ in range(40):
            table.observe_probe_timing("m", "r", Timing(1, 1, 1, busy_s, 0.5), busy_s + 0.503)
        expected_ms = 10.0 if busy_s > 0.010 else 4.0
        cost = table.snapshot().models["m"]
        assert cost.batch_ms(1.0) == pytest.approx(expected_ms, rel=0.25)
        assert cost.hop_ms == pytest.approx(3.0)
        assert cost.queue_ms == 0.0


def test_one_fast_probe_is_proof() -> None:
    table = table_of("m")
    for _ in range(200):
        table.observe_timing("m", "r", timing(12.0, 0.0, 0.0, 1, 1, 1), 0.012)
    table.observe_probe_timing("m", "r", Timing(1, 40, 1, 0.004, 0.0), 0.005)
    assert table.snapshot().models["m"].batch_ms(1.0) == pytest.approx(4.0, rel=0.1)


def test_before_any_batch_the_profile_counts() -> None:
    cost = table_of("m").snapshot().models["m"]
    assert (cost.base_ms, cost.samples) == (10.0, 0)


def check(table: RouterTable, rng: random.Random, acceptance: float, window: int = 4) -> None:
    accepted = 0
    while accepted < window and rng.random() < acceptance:
        accepted += 1
    table.observe_check(CheckSeen("a", "b", window, accepted))


@pytest.mark.parametrize("acceptance", [0.02, 0.55, 0.85, 1.0])
def test_acceptance_is_unbiased_though_checks_stop_at_the_first_mismatch(acceptance: float) -> None:
    table, rng = table_of("a", "b"), random.Random(3)
    for _ in range(2000):
        check(table, rng, acceptance)
    assert table.snapshot().acceptance("a", "b") == pytest.approx(acceptance, abs=0.04)


@pytest.mark.parametrize(
    ("before", "after", "rounds", "error"),
    # 30 rounds at .1 examine 33 positions: two standard errors and the prior's pull make .13.
    [(0.9, 0.1, 30, 0.13), (0.1, 0.9, 30, 0.08), (0.72, 0.85, 150, 0.05), (0.85, 0.72, 150, 0.05)],
)
def test_a_change_is_followed(before: float, after: float, rounds: int, error: float) -> None:
    errors = []
    for seed in range(10):
        table, rng = table_of("a", "b"), random.Random(seed)
        for acceptance, count in ((before, 1000), (after, rounds)):
            for _ in range(count):
                check(table, rng, acceptance)
        errors.append(abs(table.snapshot().acceptance("a", "b") - after))
    assert sorted(errors)[7] < error


def test_probes_teach_pairs_that_never_ran_together() -> None:
    table = table_of("a", "b", "c")
    table.observe_probe({"a": [1, 2, None, 4] * 50, "b": [1, 9, 3, 4] * 50, "c": [1, 2, 3, 5] * 50})
    pairs = table.snapshot().pairs
    assert pairs["a", "b"].acceptance == pytest.approx(2 / 3, abs=0.02)
    assert pairs["a", "c"].acceptance == pytest.approx(2 / 3, abs=0.02)
    assert pairs["b", "c"].divergence == pytest.approx(0.5, abs=0.02)
    assert pairs["a", "b"].divergence == pytest.approx(1 / 3, abs=0.02)
    assert pairs["a", "c"].samples == 150  # where the n-gram had no guess there was no trial
    assert pairs["b", "c"].samples == 200


def test_drafts_that_end_early_lower_what_a_drafter_brings() -> None:
    table = table_of("a", "b")
    assert table.snapshot().draft_continues("a", 2) == [1.0, 1.0]
    for _ in range(1000):
        table.observe_draft("a", 4, 1)
    first, *later = table.snapshot().draft_continues("a", 3)
    assert first == pytest.approx(1.0)
    assert later == pytest.approx([0.0, 0.0], abs=0.03)


def test_drafts_that_are_right_in_runs_are_followed_position_by_position() -> None:
    firsts = []
    for seed in range(9):
        table, rng = table_of("a", "b"), random.Random(seed)
        for _ in range(1500):
            accepted = 6 if rng.random() < 0.4 else 0
            table.observe_check(CheckSeen("a", "b", 6, accepted, num_asked=6))
        first, *later = table.snapshot().draft_goes_on("a", "b", 9)
        firsts.append(first)
        assert later == pytest.approx([1.0] * 8, abs=0.1)
    assert statistics.median(firsts) == pytest.approx(0.4, abs=0.04)


def test_a_draft_that_went_unfinished_did_not_go_on() -> None:
    """Three of six tokens drafted, all accepted: the fourth was neither."""
    table = table_of("a", "b")
    for _ in range(1000):
        table.observe_draft("a", 6, 3)
        table.observe_check(CheckSeen("a", "b", 3, 3, num_asked=6))
    assert table.snapshot().draft_goes_on("a", "b", 5) == pytest.approx([1.0, 1.0, 1.0, 0.0, 0.0], abs=0.03)
    assert table.snapshot().acceptance("a", "b") > 0.98


def test_runs_are_learned_anew_after_a_change() -> None:
    table = table_of("a", "b")
    for accepted in (4, 0):
        for _ in range(100):
            table.observe_check(CheckSeen("a", "b", 4, accepted, num_asked=4))
    assert table.snapshot().draft_goes_on("a", "b", 1)[0] < 0.1


def test_probes_tell_how_a_draft_begins() -> None:
    table = table_of("a", "b")
    table.observe_probe({"a": [None, 1, 2, None] * 100, "b": [1, 1, 1, 1] * 100})
    assert table.snapshot().draft_continues("a", 1) == pytest.approx([0.5], abs=0.03)
    assert table.snapshot().draft_goes_on("a", "b", 1) == pytest.approx([0.25], abs=0.03)


def test_a_model_profiled_again_keeps_what_was_learned() -> None:
    table = table_of("a", "b")
    table.observe_check(CheckSeen("a", "b", 4, 4))
    table.add_model("a", 1, Profile(base_ms=99.0))
    assert table.snapshot().pairs["a", "b"].samples == 4
    assert table.snapshot().models["a"].base_ms == 10.0


def test_rows_have_the_contract_s_fields() -> None:
    rows = as_rows(table_of("a", "b"))
    assert set(rows["models"][0]) == {"name", "level", "base_ms", "per_token_ms", "per_sequence_ms", "queue"}
    contract = {"lower", "upper", "class", "regime", "divergence", "acceptance", "samples"}
    assert set(rows["pairs"][0]) == contract | {"divergence_bounds", "predicted_acceptance"}


def test_divergence_is_that_of_the_distributions_where_they_are_stated() -> None:
    """Samples agree at half of the positions; the distributions overlap by .7 of their mass."""
    table = table_of("a", "b")
    samples = {"a": [1, 2] * 4, "b": [1, 3] * 4}
    table.observe_probe(samples)
    assert table.snapshot().pairs["a", "b"].divergence == pytest.approx(0.5)
    tops: dict[str, list[Top]] = {"a": [((1, 0.7), (2, 0.3))] * 8, "b": [((1, 1.0),)] * 7 + [()]}
    table.observe_probe(samples, ("short code", "greedy"), tops)
    for pairs in (table.snapshot().pairs, table.snapshot(("short code", "greedy")).pairs):
        assert pairs["a", "b"].divergence == pytest.approx(0.3)
        bounds = pairs["a", "b"].bounds
        assert bounds is not None
        assert bounds.acceptance == pytest.approx((0.7, 0.7))


def test_probes_start_at_once_prefer_unknown_pairs_and_stay_within_their_share() -> None:
    table, budget = table_of("a", "b", "c"), ProbeBudget()
    first = choose_probe(budget, table.snapshot(), ("a", "b", "c"), [("b", "c")], 10, 0.05, OwnRates())
    assert first == ProbePlan(("a", "b"), 10)
    taken = []
    for _ in range(1000):
        probe = choose_probe(budget, table.snapshot(), ("a", "b", "c"), [("b", "c")], 100, 0.05, OwnRates())
        budget.record(probe)
        if probe is not None:
            assert probe.count == 64
            taken.append(probe.models)
            table.observe_probe({**{name: [1] * 64 for name in probe.models}, "c": [1] * 64})
    assert 20 <= len(taken) <= 50
    assert table.snapshot().pairs["a", "c"].samples >= 64


def test_models_hardly_known_are_probed_first_and_then_all() -> None:
    table, budget = table_of("a", "b", "c", "d"), ProbeBudget()
    models, vague = ("a", "b", "c", "d"), [("a", "b"), ("b", "d")]

    def probed(vague_pairs: list[tuple[str, str]]) -> tuple[str, ...]:
        budget.rounds, budget.rounds_s = budget.rounds + 100.0, 100.0
        snapshot = table.snapshot()
        known = {key: replace(pair, samples=10 if key in vague_pairs else 900) for key, pair in snapshot.pairs.items()}
        over_all = replace(snapshot, pairs=known)
        probe = choose_probe(budget, snapshot, models, [("c", "d")], 100, 0.05, OwnRates(), over_all)
        assert probe is not None
        budget.record(probe)
        return probe.models

    assert probed(vague) == ("a", "b", "c")  # nothing is known of any pair in this context
    table.observe_probe({name: [1] * 64 for name in models})
    for _ in range(40):
        for name in ("a", "b"):
            table.observe_request((name, "d"), 50, 40)  # requests are alike
    assert probed(vague) == ("a", "b")
    assert probed([]) == ("a", "b", "c")


@pytest.mark.parametrize("wish", [Speculation("off"), Speculation("fixed", ("b",))])
def test_requests_that_do_not_ask_for_the_planner_carry_no_probes(wish: Speculation) -> None:
    planning = Planning(RouterSettings(("a", "b")), lambda: 0.0, RouterStats())
    for name in ("a", "b"):
        planning.add_model(name, Profile(1.0))
    alone = Plan(("b",), (), 0.0)
    assert planning.choose_probe(("a", "b"), alone, 10, wish, OwnRates()) is None
    assert planning.choose_probe(("a", "b"), alone, 10, Speculation(), OwnRates()) == ProbePlan(("a",), 10)


def test_a_request_is_probed_soon_where_requests_differ() -> None:
    pair = PairEstimate("a", "b", 0.5, 0.5, 900)
    models = dict(table_of("a", "b").snapshot().models)
    budget = ProbeBudget(rounds=1000, probes=30, rounds_s=1000.0, probes_s=1.0)
    for prior_positions, examined, num_outputs, probes in (
        (8.0, 0.0, 20, True),
        (8.0, 9.0, 20, False),
        (8.0, 0.0, 15, False),
        (200.0, 0.0, 20, False),
    ):
        snapshot = TableSnapshot(models, {("a", "b"): replace(pair, prior_positions=prior_positions)})
        own = OwnRates()
        own.observe(("a", "b"), int(examined), [0.5] * int(examined), prior_positions)
        probe = choose_probe(budget, snapshot, ("a", "b"), [], num_outputs, 0.05, own)
        assert (probe is not None) == probes


def test_a_probe_that_took_long_is_paid_off_before_the_next() -> None:
    budget = ProbeBudget(rounds=1000, probes=1, rounds_s=10.0, probes_s=1.0)
    nothing: list[tuple[str, str]] = []
    asked = (table_of("a", "b").snapshot(), ("a", "b"), nothing, 10, 0.05, OwnRates())
    assert choose_probe(budget, *asked) is None
    budget.rounds_s = 20.0
    assert choose_probe(budget, *asked) is not None


def test_no_probe_where_nothing_can_be_learned_or_spent() -> None:
    snapshot, budget = table_of("a", "b").snapshot(), ProbeBudget()
    assert choose_probe(budget, snapshot, ("a", "b"), [("a", "b")], 10, 0.05, OwnRates()) is None
    assert choose_probe(budget, snapshot, ("b",), [], 10, 0.05, OwnRates()) is None
    assert choose_probe(budget, snapshot, ("a", "b"), [], 10, 0.0, OwnRates()) is None
    assert choose_probe(budget, snapshot, ("a", "b"), [], 0, 0.05, OwnRates()) is None
    assert choose_probe(budget, snapshot, ("a", "b"), [], 10, 0.05, OwnRates()) == ProbePlan(("a",), 10)


@pytest.mark.parametrize(("errors", "strength"), [("shared", -1.0), ("independent", 0.0), ("same", 1.0)])
def test_whether_errors_fall_together_is_learned_from_probes_and_from_checks(errors: str, strength: float) -> None:
    """a and c agree with b where u and v are small; the planner's rates for the kinds of b's tokens follow."""
    rng = random.Random(4)
    by_probes, by_checks = table_of("a", "b", "c"), table_of("a", "b", "c")
    for _ in range(4000):
        u = rng.random()
        v = {"shared": 1.0 - u, "independent": rng.random(), "same": u}[errors]
        first, second = u < 0.6, v < 0.7
        by_probes.observe_probe({"a": [0 if first else 1], "b": [0], "c": [0 if second else 1]})
        origin = Origin(Kind.KEPT if first else Kind.CORRECTED, "a")
        by_checks.observe_check(CheckSeen("b", "c", 1, int(second), 0, (origin,)))
        by_checks.observe_check(CheckSeen("a", "b", 1, int(first), 1))
    for table in (by_probes, by_checks):
        snapshot = table.snapshot()
        assert snapshot.association["a", "b", "c"] == pytest.approx(strength, abs=0.15)
        rates = snapshot.rates("a", "b", "c")
        assert 0.6 * rates.kept + 0.4 * rates.corrected == pytest.approx(0.7, abs=0.04)
        if errors == "shared":
            assert rates.kept == pytest.approx(0.5, abs=0.04)


def test_a_context_unlike_the_others_is_so_at_positions_it_never_reached_as_well() -> None:
    """Checked in a chain of three only, where no draft of it is seen."""
    table, rng = table_of("a", "b", "c"), random.Random(6)
    for _ in range(600):
        accepted = 0
        while accepted < 4 and rng.random() < 0.5:
            accepted += 1
        table.observe_check(CheckSeen("b", "c", 4, accepted, 4))
        kept = int(rng.random() < 0.9)
        table.observe_check(CheckSeen("b", "c", 1, kept, 0, (Origin(Kind.EXTENDED),)), ("short digits", "greedy"))
    assert min(table.snapshot(("short digits", "greedy")).draft_goes_on("b", "c", 4)) > 0.7


def test_positions_that_a_context_never_reached_go_by_all() -> None:
    table = table_of("a", "b")
    for _ in range(400):
        table.observe_check(CheckSeen("a", "b", 4, 4, 4))
    for _ in range(100):
        table.observe_check(CheckSeen("a", "b", 1, 0, 1), ("short code", "greedy"))
    first, *later = table.snapshot(("short code", "greedy")).draft_goes_on("a", "b", 4)
    assert first < 0.3
    assert min(later) > 0.9


def test_a_change_of_one_pair_puts_the_others_of_its_models_in_doubt() -> None:
    table, rng = table_of("a", "b", "c"), random.Random(5)
    for _ in range(20):
        table.observe_probe({name: [1] * 64 for name in ("a", "b", "c")})
    assert min(pair.samples for pair in table.snapshot().pairs.values()) > 1000
    for _ in range(30):
        table.observe_check(CheckSeen("a", "b", 4, 0 if rng.random() < 0.9 else 4, 4))
    pairs = table.snapshot().pairs
    assert pairs["a", "c"].samples <= 32
    assert pairs["b", "c"].samples <= 32
    assert pairs["a", "c"].acceptance > 0.9  # as far as is known


def test_contexts_are_told_apart_and_little_seen_ones_go_by_all() -> None:
    table, rng = table_of("a", "b"), random.Random(9)
    for _ in range(400):
        for request_class, acceptance in (("short code", 0.9), ("short prose", 0.2)):
            accepted = int(rng.random() < acceptance)
            table.observe_check(CheckSeen("a", "b", 1, accepted, 1), (request_class, "greedy"))
    table.observe_check(CheckSeen("a", "b", 1, 1, 1), ("long prose", "greedy"))
    for request_class, expected in (("short code", 0.9), ("short prose", 0.2), ("long prose", 0.55), ("new", 0.55)):
        seen = table.snapshot((request_class, "greedy"))
        assert seen.acceptance("a", "b") == pytest.approx(expected, abs=0.06), request_class
        assert seen.draft_goes_on("a", "b", 1) == pytest.approx([expected], abs=0.08), request_class
    classes = {row["class"] for row in as_rows(table)["pairs"]}
    assert classes == {"all", "short code", "short prose", "long prose"}


def test_waits_are_told_apart_by_whether_requests_keep_step() -> None:
    table = table_of("m")
    table.num_open = 8
    assert table.snapshot().models["m"].queue_batches == 0.0
    assert table.snapshot().models["m"].uneven_queue_batches == pytest.approx(0.25, abs=0.02)  # a guess
    for keeps_step, queue_s in ((True, 0.001), (False, 0.008)):
        for _ in range(60):
            table.observe_timing("m", "r", Timing(1, 1, 1, 0.010, queue_s), 0.010 + queue_s, keeps_step)
    cost = table.snapshot().models["m"]
    assert [cost.queue_batches, cost.uneven_queue_batches] == pytest.approx([0.1, 0.8])
    assert cost.queue_ms == pytest.approx(8.0, rel=0.1)


def test_all_who_share_a_batch_tell_of_one_batch() -> None:
    """Two groups of 32 take turns; whoever answered last, half of all batches were waited for."""
    table = table_of("m")
    for _ in range(40):
        for queue_s in (0.0, 0.2):
            for _ in range(32):
                table.observe_timing("m", "r", Timing(1, 32, 32, 0.2, queue_s), 0.2 + queue_s)
    cost = table.snapshot().models["m"]
    assert cost.queue_batches == pytest.approx(0.5, abs=0.1)
    assert cost.sharing == pytest.approx(32.0)
