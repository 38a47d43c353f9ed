"""The plot of a run with drift: plan, acceptance and time per token over time. matplotlib is needed to draw only."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.round_log import Round, smoothed

ROUNDS_SMOOTHED = 8


@dataclass(slots=True)
class Trace:
    """One run. `tables`: (seconds, GET /router/table); `changes`: (seconds, what changed)."""

    rounds: list[Round] = field(default_factory=list)
    tables: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    changes: list[tuple[float, str]] = field(default_factory=list)

    def take(self, table: dict[str, Any]) -> None:
        self.tables.append((time.perf_counter(), table))

    def plans(self) -> list[tuple[float, str]]:
        return [(at_s, f"{'→'.join(t['chain'])} {t['windows']}") for at_s, t in self.tables]

    def acceptances(self) -> dict[str, list[tuple[float, float]]]:
        """Of every pair, over time."""
        found: dict[str, list[tuple[float, float]]] = {}
        for at_s, table in self.tables:
            for pair in table["pairs"]:
                found.setdefault(f"{pair['lower']}→{pair['upper']}", []).append((at_s, pair["acceptance"]))
        return found


def draw(trace: Trace, path: Path) -> None:
    """A PNG of three panels that share their time."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    start_s = trace.rounds[0].end_s
    with mpl.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8.0, 5.6), dpi=110, layout="constrained")
        plan, acceptance, speed = figure.subplots(3, 1, sharex=True, height_ratios=(1.2, 1.0, 1.2))
        plans = trace.plans()
        plan.step([s - start_s for s, _ in plans], [name for _, name in plans], where="post", linewidth=1.2)
        plan.set_title("plan", loc="left", fontsize=8)
        for name, points in trace.acceptances().items():
            acceptance.plot([s - start_s for s, _ in points], [value for _, value in points], label=name, linewidth=1.2)
        acceptance.set_ylim(0.0, 1.0)
        acceptance.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        acceptance.set_title("acceptance in the table", loc="left", fontsize=8)
        points = smoothed(trace.rounds, ROUNDS_SMOOTHED)
        speed.plot([s - start_s for s, _ in points], [value for _, value in points], linewidth=1.0)
        speed.set_ylim(bottom=0.0)
        title = f"milliseconds per token at the client, over {ROUNDS_SMOOTHED} rounds each"
        speed.set_title(title, loc="left", fontsize=8)
        speed.set_xlabel("seconds")
        for at_s, name in trace.changes:
            for axes in (plan, acceptance, speed):
                axes.axvline(at_s - start_s, color="0.6", linewidth=0.8, linestyle=":")
            speed.annotate(name, (at_s - start_s, 1.0), xycoords=("data", "axes fraction"), fontsize=7, va="top")
        figure.savefig(path)
