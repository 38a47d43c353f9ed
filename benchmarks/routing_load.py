"""Part `load`: adaptive beside the best static plan at several concurrencies."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.emulated_app import emulated_app
from benchmarks.emulated_client import AUTO, EmulatedClient, emulated_client
from benchmarks.report import Report
from benchmarks.static_search import StaticPlan, grid, halving
from benchmarks.traffic import Request, always, in_turn, numbered, steady, times_of
from cluster.config import load_config

CONFIG = Path("configs/emulated.yaml")
SURVIVORS = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """Lengths of one row, so that it takes about two minutes: tokens of a trial, and requests of each stream in the
    rounds of the search, in the warm-up, and in each turn of the measurement.
    """

    trial_tokens: int
    search: tuple[int, ...]
    warm_up: int
    turns: int
    per_turn: int
    tokens: int
    limit: float


SETTINGS = {
    1: Setting(40, (1, 2, 4), 8, 8, 2, 96, 1.05),
    8: Setting(24, (1, 1, 2), 2, 5, 1, 64, 1.05),
    32: Setting(16, (1, 1, 2), 1, 4, 1, 64, 1.10),
}


async def load(report: Report, concurrencies: list[int]) -> None:
    with emulated_app(load_config(CONFIG)) as app:
        async with emulated_client(app) as client:
            for concurrency in concurrencies:
                await _row(client, report, concurrency, SETTINGS[concurrency])


async def _row(client: EmulatedClient, report: Report, concurrency: int, setting: Setting) -> None:
    title = f"load {concurrency}"

    async def trial(plan: StaticPlan, turn: int) -> float:
        def request(number: int) -> Request:
            return Request(f"{title} search {turn} {number}", setting.trial_tokens, plan.wish)

        return times_of(await steady(client, concurrency, setting.search[turn], request)).mean

    plans = list(grid(client.names))
    best = await halving(plans, trial, len(setting.search), SURVIVORS)

    def warming(number: int) -> Request:
        return Request(f"{title} warm-up {number}", setting.tokens, AUTO)

    warm_up = await steady(client, concurrency, setting.warm_up, warming)
    report.add(f"{title}: {len(plans)} static plans tried; warm-up of adaptive", f"{len(warm_up)} requests")
    wishes = {"adaptive": always(AUTO)} | {str(plan): always(plan.wish) for plan in best}
    prompts = numbered(title, setting.turns)
    answers, busy = await in_turn(client, concurrency, wishes, prompts, setting.tokens, setting.per_turn)
    times = {name: times_of(of_name) for name, of_name in answers.items()}
    for plan in best:
        report.add(f"{title}: {plan}", str(times[str(plan)]))
    ratio = times["adaptive"].mean / min(times[str(plan)].mean for plan in best)
    table = await client.table()
    chosen = f"{'→'.join(table['chain'])} {table['windows']}"
    target = f"≤ {setting.limit:.2f}×: {ratio:.3f}"
    report.add(f"{title}: adaptive ({chosen})", str(times["adaptive"]), target, ratio <= setting.limit)
    report.add(f"{title}: processors busy", f"{busy:.0%}")
