"""An app of emulated models on a Ray of its own, deployed as RayService does it: by a Serve config.

Only so can `user_config` change later without restarting replicas, which `code_version` of the same config keeps.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.context import _get_global_client, _set_global_client
from ray.serve.schema import ServeDeploySchema

from cluster.config import AppConfig, EmulatedModel
from cluster.ray_runtime import ray_runtime

ROOT = Path(__file__).parents[1]
START_S = 180.0
CALL_S = 10.0


class NotReady(Exception):
    """The app did not start, or did not take new values, in time."""


@dataclass(slots=True)
class EmulatedApp:
    """`emulate`: model name → the values that hold now."""

    config: AppConfig
    emulate: dict[str, dict[str, Any]]

    def deploy(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Change `emulate` values of some models live, through Serve's user_config. Returns when the app runs them."""
        for model, values in changes.items():
            self.emulate[model] = {**self.emulate[model], **values}
        names = [{"name": model, "user_config": values} for model, values in self.emulate.items()]
        app = {
            "name": self.config.name,
            "route_prefix": "/",
            "import_path": "deployments.app:build_app",
            "args": {"config": self.config.model_dump(mode="json", exclude_unset=True)},
            "deployments": names,
        }
        client = _get_global_client()
        assert client is not None
        client.deploy_apps(ServeDeploySchema.model_validate({"applications": [app]}))
        self._wait()

    def _wait(self) -> None:
        deadline_s = time.monotonic() + START_S
        time.sleep(1.0)  # the controller takes the new config in its next loop
        while time.monotonic() < deadline_s:
            status = serve.status().applications.get(self.config.name)
            if status is not None and status.status == "RUNNING":
                return
            if status is not None and status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise NotReady(status.message or str(status))
            time.sleep(0.2)
        raise NotReady(f"not running after {START_S:.0f} s")

    async def call(self, deployment: str, method: str) -> Any:
        handle = serve.get_deployment_handle(deployment, self.config.name)
        return await asyncio.wait_for(getattr(handle, method).remote(), CALL_S)

    async def change_now(self, model: str, values: Mapping[str, Any]) -> float:
        """The replica's own `reconfigure`, which `deploy` has Serve call within a second; returns the time.

        `deploy({})` then tells Serve, which would else bring the old values back.
        """
        self.emulate[model] = {**self.emulate[model], **values}
        handle = serve.get_deployment_handle(model, self.config.name)
        await asyncio.wait_for(handle.reconfigure.remote(self.emulate[model]), CALL_S)
        return time.perf_counter()

    async def change_router(self, values: Mapping[str, Any]) -> None:
        """Other values of the config's section `router`, at once."""
        handle = serve.get_deployment_handle("Router", self.config.name)
        await asyncio.wait_for(handle.reconfigure.remote(dict(values)), CALL_S)

    async def replicas(self, method: str) -> dict[str, Any]:
        """Model name → what its replica answers (one replica each)."""
        return {model.name: await self.call(model.name, method) for model in self.config.models}


def emulated_config(
    name: str, emulate: Mapping[str, Mapping[str, Any]], levels: Mapping[str, int] | None = None, **sections: Any
) -> AppConfig:
    """Of models with these `emulate` values, cheapest first, the target last."""
    models = [
        {"name": model, "kind": "emulated", "emulate": values} | ({} if levels is None else {"level": levels[model]})
        for model, values in emulate.items()
    ]
    return AppConfig.model_validate({"name": name, "models": models, **sections})


@contextmanager
def emulated_app(config: AppConfig) -> Iterator[EmulatedApp]:
    """The app, running; gone after the block."""
    emulate = {m.name: m.emulate.model_dump(exclude_none=True) for m in config.models if isinstance(m, EmulatedModel)}
    if len(emulate) != len(config.models):
        raise ValueError("all models of the config must be emulated")
    os.environ["RAY_SERVE_ENABLE_TASK_EVENTS"] = "1"  # else Ray does not record the calls that `ray_tasks` counts
    _set_global_client(None)  # of an app before this one: Serve takes its client to be alive
    with ray_runtime(config.name, config.http.host, config.http.port, ROOT):
        app = EmulatedApp(config, emulate)
        app.deploy({})
        yield app


def ray_tasks() -> Counter[str]:
    """Names of all Ray tasks and actor calls executed so far, as Ray's own control store recorded them."""
    events = ray._private.state.state.profile_events()  # noqa: SLF001 - the dashboard, which lists tasks, is off
    names: Counter[str] = Counter()
    for component in events.values():
        names.update(e["event_type"] for e in component if str(e["event_type"]).startswith("task::"))
    return names
