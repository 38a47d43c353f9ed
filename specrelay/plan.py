"""`plan`: which replica would stand on what, here or on the cluster that RAY_ADDRESS names; starts nothing."""

from collections.abc import Sequence
from pathlib import Path

import ray
from rich.console import Console
from rich.table import Table

from cluster.config import AppConfig
from cluster.placement import Placement, place
from cluster.preflight import NodeCapacity, check_resources, machine_capacity
from cluster.ray_runtime import RayRuntime, connect, joins_cluster

ROOT = Path(__file__).parents[1]


def show_plan(config: AppConfig, console: Console) -> None:
    """Print the placement; then PreflightError where it cannot be."""
    nodes = cluster_nodes()
    placements = place(config, len(nodes))
    console.print(render(config, placements, nodes))
    check_resources(placements, nodes)


def cluster_nodes() -> Sequence[NodeCapacity]:
    if not joins_cluster():
        return [machine_capacity()]
    connect(ROOT)
    try:
        return RayRuntime(joined=True).nodes()
    finally:
        ray.shutdown()


def render(config: AppConfig, placements: Sequence[Placement], nodes: Sequence[NodeCapacity]) -> Table:
    """A row per model; the caption says what the nodes offer together."""
    offered = f"{sum(node.cpus for node in nodes):g} cpus, {sum(node.gpus for node in nodes):g} gpus"
    caption = f"{len(nodes)} node{'s' * (len(nodes) != 1)}: {offered}"
    columns = ("level", "model", "kind", "replicas", "cpus", "gpus", "accelerator", "labels", "one per node")
    table = Table(*columns, title=config.name, title_justify="left", caption=caption, caption_justify="left")
    for placement in placements:
        table.add_row(*_cells(placement))
    return table


def _cells(placement: Placement) -> list[str]:
    labels = " ".join(f"{key}={value}" for key, value in placement.labels.items())
    accelerator = placement.accelerator_type or "any"
    numbers = [str(placement.num_replicas), f"{placement.cpus:g}", f"{placement.gpus:g}"]
    apart = "yes" if placement.max_replicas_per_node == 1 else "no"
    return [str(placement.level), placement.model, placement.kind, *numbers, accelerator, labels, apart]
