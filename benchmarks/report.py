"""The rows that a benchmark prints, and whether one of them missed its target."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Report:
    """The rows of the printed table; `short` where one missed its target."""

    short: bool = False
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)

    def add(self, name: str, figure: str, target: str = "", met: bool | None = None) -> None:
        verdict = "" if met is None else "OK" if met else "SHORT"
        self.short |= met is False
        self.rows.append((name, figure, target, verdict))
        print(f"{name:<58} {figure:>30}  {target:<22} {verdict}", flush=True)


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
