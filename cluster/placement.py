"""Where the replicas of an app go: a pure function of config and cluster size, for `plan` and for the deployments."""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.config import AppConfig, Model

RayValue = float | str | dict[str, str]


@dataclass(frozen=True, slots=True)
class Placement:
    """One model: `num_replicas` replicas, each with these resources.

    `max_replicas_per_node` is 1 where each replica can have a node of its own, None where they share nodes. Different
    models are spread over the nodes by Ray Serve itself.
    """

    model: str
    kind: str
    level: int
    num_replicas: int
    cpus: float
    gpus: float
    accelerator_type: str | None
    labels: Mapping[str, str]
    max_replicas_per_node: int | None

    @property
    def ray_actor_options(self) -> dict[str, RayValue]:
        """For `@serve.deployment`. CPUs are always named: with Serve's default of one a chain never starts on two."""
        options: dict[str, RayValue] = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        if self.accelerator_type is not None:
            options["accelerator_type"] = self.accelerator_type
        if self.labels:
            options["label_selector"] = dict(self.labels)
        return options


def place(config: AppConfig, num_nodes: int = 1) -> tuple[Placement, ...]:
    """Placements in the order of the config. Replicas of a model are kept apart when there are nodes enough."""
    return tuple(_place_model(model, config.levels[model.name], num_nodes) for model in config.models)


def _place_model(model: Model, level: int, num_nodes: int) -> Placement:
    apart = 1 < model.num_replicas <= num_nodes
    return Placement(
        model=model.name,
        kind=model.kind,
        level=level,
        num_replicas=model.num_replicas,
        cpus=model.resources.cpus,
        gpus=model.resources.gpus,
        accelerator_type=model.resources.accelerator_type,
        labels=model.resources.labels,
        max_replicas_per_node=1 if apart else None,
    )
