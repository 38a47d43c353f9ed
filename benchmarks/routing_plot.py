"""The plot of a run with drift: plan, acceptance and time per token over time. matplotlib is needed to draw only."""

import time
from collections.abc import Sequence
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

    def chains(self) -> list[tuple[float, str]]:
        return [(at_s, "→".join(table["chain"])) for at_s, table in self.tables]

    def drafted(self) -> list[tuple[float, int]]:
        """What the cheapest level of the chain drafts per call."""
        return [(at_s, table["windows"][0] if table["windows"] else 0) for at_s, table in self.tables]

    def acceptances(self) -> dict[str, list[tuple[float, float]]]:
        """Of every pair, over time."""
        found: dict[str, list[tuple[float, float]]] = {}
        for at_s, table in self.tables:
            for pair in table["pairs"]:
                found.setdefault(f"{pair['lower']}→{pair['upper']}", []).append((at_s, pair["acceptance"]))
        return found


def draw(trace: Trace, path: Path) -> None:
    """A PNG of panels that share their time."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    start_s = trace.rounds[0].end_s

    def seconds(points: Sequence[tuple[float, Any]]) -> tuple[list[float], list[Any]]:
        return [at_s - start_s for at_s, _ in points], [value for _, value in points]

    with mpl.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8.0, 6.0), dpi=110, layout="constrained")
        panels = figure.subplots(4, 1, sharex=True, height_ratios=(1.0, 0.7, 1.2, 1.2))
        chain, window, acceptance, speed = panels
        chain.step(*seconds(trace.chains()), where="post")
        window.step(*seconds(trace.drafted()), where="post")
        for name, points in trace.acceptances().items():
            acceptance.plot(*seconds(points), label=name)
        acceptance.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        speed.plot(*seconds(smoothed(trace.rounds, ROUNDS_SMOOTHED)))
        speed.set_xlabel("seconds")
        titles = (
            "chain",
            "first window",
            "acceptance in the table",
            f"ms per token, over {ROUNDS_SMOOTHED} rounds each",
        )
        for axes, title in zip(panels, titles, strict=True):
            axes.set_title(title, loc="left", fontsize=8, fontweight="bold")
            for at_s, _ in trace.changes:
                axes.axvline(at_s - start_s, color="0.6", linewidth=0.8, linestyle=":")
        for axes in (window, acceptance, speed):
            axes.set_ylim(bottom=0.0)
        for at_s, name in trace.changes:
            chain.annotate(name, (at_s - start_s, 1.02), xycoords=("data", "axes fraction"), fontsize=7)
        figure.savefig(path)
