"""The search for the best static plan, over costs that are known."""

from benchmarks.static_search import StaticPlan, grid, halving, neighbours

NAMES = ("a", "b", "c", "t")


def test_the_grid_has_every_chain_and_no_window_that_changes_nothing() -> None:
    plans = list(grid(NAMES))
    assert len(set(plans)) == len(plans)
    chains = {plan.chain for plan in plans}
    assert len(chains) == 8
    assert ("t",) in chains
    assert NAMES in chains
    for plan in plans:
        assert len(plan.windows) == len(plan.chain) - 1
        assert list(plan.windows) == sorted(plan.windows)


def test_neighbours_stay_within_the_bounds() -> None:
    assert set(neighbours(StaticPlan(("a", "t"), (1,)))) == {StaticPlan(("a", "t"), (2,))}
    assert set(neighbours(StaticPlan(("a", "t"), (9,)), 10)) == {StaticPlan(("a", "t"), (6,))}
    assert not list(neighbours(StaticPlan(("t",), ())))


def _cost(plan: StaticPlan) -> float:
    return len(plan.chain) + sum(abs(window - 5) for window in plan.windows) + 10.0 * (plan.chain == ("t",))


async def test_halving_finds_the_cheapest_also_beside_the_grid() -> None:
    tried: list[tuple[StaticPlan, int]] = []

    async def trial(plan: StaticPlan, turn: int) -> float:
        tried.append((plan, turn))
        return _cost(plan)

    best = await halving(list(grid(NAMES)), trial, 3, 2)
    assert len(best) == 2
    assert len(best[0].chain) == 2
    assert best[0].windows == (5,)  # which the grid lacks
    per_turn = [sum(turn == of for _, of in tried) for turn in range(3)]
    assert per_turn[0] == len(list(grid(NAMES)))
    assert per_turn[1] < per_turn[0] / 2


async def test_one_unlucky_trial_is_outweighed_by_the_others() -> None:
    plans = [StaticPlan(("a", "t"), (window,)) for window in (4, 5, 6)]

    async def trial(plan: StaticPlan, turn: int) -> float:
        return _cost(plan) + (3.0 if plan.windows == (5,) and turn == 0 else 0.0)

    assert (await halving(plans, trial, 3, 3))[0].windows == (5,)
