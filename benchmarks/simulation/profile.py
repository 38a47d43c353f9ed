"""What is simulated, as a YAML file says it: models, their replicas and links, and the router's settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from benchmarks.simulation.links import LinkSpec
from cluster.config import Emulate
from deployments.backends import emulate_spec
from models.emulated import EmulateSpec
from router.settings import RouterSettings


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Link(_Section):
    latency_ms: float = 0.3
    mbit_s: float | None = None


class _Model(_Section):
    """`copies` of a drafter are models of their own, `name-1` …; `replicas` are replicas of one."""

    name: str
    emulate: Emulate
    level: int
    copies: Annotated[int, Field(ge=1)] = 1
    replicas: Annotated[int, Field(ge=1)] = 1
    link: str = "default"


class _File(_Section):
    links: dict[str, _Link] = {}
    models: list[_Model]
    router: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class ModelProfile:
    name: str
    spec: EmulateSpec
    level: int
    replicas: int = 1
    link: LinkSpec = field(default_factory=LinkSpec)


@dataclass(frozen=True, slots=True)
class Profile:
    """`models`: cheapest first, the target last."""

    models: tuple[ModelProfile, ...]
    settings: RouterSettings

    def with_settings(self, **changes: Any) -> "Profile":
        return replace(self, settings=replace(self.settings, **changes))


def make_profile(models: tuple[ModelProfile, ...], **router: Any) -> Profile:
    """Requests are never turned away, and wait as long as it takes."""
    names, levels = tuple(m.name for m in models), tuple(m.level for m in models)
    return Profile(models, RouterSettings(names, levels, max_queue=1_000_000, step_timeout_s=60.0, **router))


def read_profile(path: Path) -> Profile:
    """Raises pydantic's ValidationError."""
    data: Mapping[str, Any] = yaml.safe_load(path.read_text())
    file = _File.model_validate(data)
    links = {"default": LinkSpec()} | {
        name: LinkSpec(link.latency_ms, link.mbit_s) for name, link in file.links.items()
    }
    models = tuple(
        ModelProfile(name, emulate_spec(m.emulate), m.level, m.replicas, links[m.link])
        for m in file.models
        for name in ([m.name] if m.copies == 1 else [f"{m.name}-{i}" for i in range(1, m.copies + 1)])
    )
    return make_profile(models, **file.router)
