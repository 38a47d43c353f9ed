"""Part `laptop`: real weights and prompts by category, adaptive beside each static chain of the same models.

As `benchmarks.peers`: over HTTP, greedy, prefill included, all in turn for each prompt, each drafting engine an app of
its own that has seen other texts only. Windows of static chains are planned.
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from benchmarks.peers.__main__ import SOURCE, Times, make_jobs, measure, print_table, ratio, read_prompts
from benchmarks.report import Report
from models.tokenizer import HubTokenizer
from models.weights import prepare

PER_CATEGORY = 2
TOKENS = 96
LEAST_OF_BEST = 0.97
CHAINS = {
    "adaptive": ("bf16", "ngram-bf16"),
    "adaptive-of-three": ("bf16", "ngram-bf16", "int4-bf16", "ngram-int4-bf16", "int4+ngram-bf16"),
}
"""Static chains by the adaptive engine with the same models (`benchmarks.peers.__main__.SERVED`)."""


def laptop(report: Report, prompts: Path, repeats: int) -> None:
    by_category = read_prompts(prompts, HubTokenizer(prepare(SOURCE, None)))
    jobs, others = (make_jobs(by_category, slice(i * PER_CATEGORY, (i + 1) * PER_CATEGORY), 1) for i in range(2))
    names = list(dict.fromkeys([*CHAINS, *(name for static in CHAINS.values() for name in static)]))
    for times in islice(measure(names, others, jobs, TOKENS, keep=False), repeats):
        print_table(times, jobs, TOKENS, "bf16")
    categories = [job.category for job in jobs]
    for adaptive, static in CHAINS.items():
        _compare(report, times, categories, adaptive, static)


def _compare(report: Report, times: Times, categories: Sequence[str], adaptive: str, static: Sequence[str]) -> None:
    """Overall beside the chain that is best overall, in each category beside the one that is best there."""
    for category in (None, *dict.fromkeys(categories)):
        chosen = [i for i, name in enumerate(categories) if category in (None, name)]

        seconds = {name: times[name][:, chosen] for name in (adaptive, *static)}
        speeds = {name: ratio(seconds[name], seconds[static[0]])[0] for name in static}
        best = max(static, key=speeds.__getitem__)
        middle, least = ratio(seconds[adaptive], seconds[best])
        needed = 1.0 if category is None else LEAST_OF_BEST
        title = f"laptop, {adaptive}, {category or 'overall'}: beside {best}"
        target = f"> {needed:.2f}" if category is None else f"≥ {needed:.2f}"
        met = middle > needed if category is None else middle >= needed
        report.add(title, f"{middle:.3f} ({least:.3f})", target, met)
