"""`status`: the live router table as rich tables. Pure rendering; the numbers are the router's."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from specrelay.endpoint import Endpoint, get_json


def show_status(endpoint: Endpoint, console: Console) -> None:
    console.print(render(get_json(endpoint, "/router/table")))


def render(table: dict[str, Any]) -> RenderableType:
    """Chain, models with their replicas, pairs and candidate chains of one `/router/table`."""
    windows = " ".join(str(window) for window in table.get("windows") or []) or "–"
    head = f"chain [bold]{_chain(table.get('chain') or [])}[/bold]  windows {windows}"
    head += f"  generation {table.get('generation')}  explore {_share(table.get('explore_share'))}"
    return Group(head, _models(table), _pairs(table), _candidates(table))


def _models(table: dict[str, Any]) -> Table:
    columns = ["model", "level", "base ms", "ms/token", "ms/seq", "queue", "replica", "node", "seqs", "kv tokens", "up"]
    rows = []
    for model in table.get("models", []):
        latency = [_number(model.get(key)) for key in ("base_ms", "per_token_ms", "per_sequence_ms")]
        first = [model.get("name"), model.get("level"), *latency, _number(model.get("queue"))]
        replicas = [_replica(replica) for replica in model.get("replicas", [])] or [
            ["none", "", "", "", "[red]no[/red]"]
        ]
        rows += [first + replicas[0], *([""] * len(first) + replica for replica in replicas[1:])]
    return _table("models", columns, rows)


def _replica(replica: dict[str, Any]) -> list[object]:
    used = f"{replica.get('kv_used_tokens')}/{replica.get('kv_total_tokens')}"
    up = "yes" if replica.get("up") else "[red]no[/red]"
    return [replica.get("id"), replica.get("node"), replica.get("sequences"), used, up]


def _pairs(table: dict[str, Any]) -> Table:
    keys = ["lower", "upper", "class", "regime", "divergence", "acceptance", "samples"]
    return _table("pairs", keys, ([_number(pair.get(key)) for key in keys] for pair in table.get("pairs", [])))


def _candidates(table: dict[str, Any]) -> Table:
    columns = ["chain", "windows", "predicted ms/token", "measured ms/token", "rounds"]
    rows = (
        [
            _chain(candidate.get("chain") or []),
            " ".join(str(window) for window in candidate.get("windows") or []),
            _number(candidate.get("predicted_ms_per_token")),
            _number(candidate.get("measured_ms_per_token")),
            candidate.get("rounds"),
        ]
        for candidate in table.get("candidates", [])
    )
    return _table("candidates", columns, rows)


def _table(title: str, columns: list[str], rows: Iterable[list[object]]) -> Table:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    return table


def _chain(chain: list[object]) -> str:
    """`a → b → c`; cooperating drafters, a list inside the list, as `a+b → c`."""
    return " → ".join("+".join(map(str, part)) if isinstance(part, list) else str(part) for part in chain)


def _number(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _share(value: object) -> str:
    return f"{value:.1%}" if isinstance(value, int | float) else "–"
