"""The app's graph of Serve deployments, for `specrelay serve`, `serve run deployments.app:build_app` and RayService."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from cluster.config import load_config, parse_config
from cluster.placement import Placement, place
from deployments.coordinator import KVCoordinator
from deployments.ingress import Ingress
from deployments.model_replica import ModelReplica
from deployments.router import Router

MANY_REQUESTS = 10_000
HEALTH: dict[str, Any] = {
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 10.0,
    "graceful_shutdown_timeout_s": 5.0,
}


def build_app(args: dict[str, object]) -> Application:
    """`args["config"]`: the path of a YAML file, or its content. Raises ConfigError."""
    given = args["config"]
    if isinstance(given, Mapping):
        config = parse_config(given, str(given.get("name", "app")))
    else:
        config = load_config(Path(str(given)))
    data = config.model_dump(mode="json", exclude_unset=True)
    token_env, waiting = config.security.stream_token_env, config.http.max_queue
    names = [model.name for model in config.models]
    coordinator = _one(KVCoordinator).bind(names, waiting, config.kv.lease_s, token_env)
    router = _one(Router).bind(data, coordinator)
    placements = place(config, num_nodes())
    replicas = [_replicas(placement).bind(data, placement.model, coordinator) for placement in placements]
    app: Application = _one(Ingress).bind(data, router, replicas)
    return app


def num_nodes() -> int:
    """Living nodes of the cluster that builds the app; 1 where it is only looked at."""
    return sum(node["Alive"] for node in ray.nodes()) if ray.is_initialized() else 1


def _one(cls: type) -> Any:
    """A deployment of one replica that takes no CPU from the models (Any: Serve types only the decorator's use)."""
    return serve.deployment(**_options(cls.__name__, 1), ray_actor_options={"num_cpus": 0})(cls)


def _replicas(placement: Placement) -> Any:
    options = _options(placement.model, placement.num_replicas)
    if placement.max_replicas_per_node is not None:
        options["max_replicas_per_node"] = placement.max_replicas_per_node
    return serve.deployment(**options, ray_actor_options=dict(placement.ray_actor_options))(ModelReplica)


def _options(name: str, num_replicas: int) -> dict[str, Any]:
    return {"name": name, "num_replicas": num_replicas, "max_ongoing_requests": MANY_REQUESTS, **HEALTH}
