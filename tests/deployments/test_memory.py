"""The router's memory on disk costs at most itself."""

import asyncio
from pathlib import Path

import pytest

from cluster.config import load_config, parse_config
from deployments import memory
from deployments.memory import Memory, memory_path
from kvstate.protocol import Profile
from router.checks import CheckSeen
from router.learned import NOTHING
from router.service import RouterCore
from router.settings import RouterSettings

CONFIG = load_config(Path(__file__).parents[2] / "configs/emulated.yaml")


class Nowhere:
    def to_replica(self, *_: object) -> bool:
        return False

    to_coordinator = to_ingress = to_replica


async def test_what_a_router_learns_is_there_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SAVE_S", 0.0)
    file = Memory(tmp_path / "router" / "app.json")
    assert file.read() == NOTHING
    core = RouterCore(RouterSettings(("a", "b")), Nowhere(), generation=1)
    for name in ("a", "b"):
        core.planning.add_model(name, Profile(1.0))
    keeping = asyncio.create_task(file.keep(core))
    core.planning.table.observe_check(CheckSeen("a", "b", 4, 4, 4))
    core.stats.rounds += 1
    async with asyncio.timeout(10.0):
        while file.read() == NOTHING:  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.01)
    keeping.cancel()
    assert file.read() == core.planning.table.learned()
    assert [path.name for path in (tmp_path / "router").iterdir()] == ["app.json"]


def test_a_broken_file_is_no_reason_not_to_start(tmp_path: Path) -> None:
    (tmp_path / "app.json").write_bytes(b"half a fi")
    assert Memory(tmp_path / "app.json").read() == NOTHING
    assert Memory(tmp_path).read() == NOTHING


def test_a_memory_belongs_to_its_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECRELAY_CACHE", str(tmp_path))
    data = CONFIG.model_dump(mode="json", exclude_unset=True)
    path = memory_path(CONFIG)
    assert path.is_relative_to(tmp_path)
    slower = [{**model, "emulate": {**model["emulate"], "base_ms": 99.0}} for model in data["models"]]
    assert memory_path(parse_config({**data, "models": slower}, "x")) == path
    assert memory_path(parse_config({**data, "models": data["models"][1:]}, "x")) != path
