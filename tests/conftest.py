"""Unit tests cannot start Ray; those that prove the shell carry `@pytest.mark.ray`."""

from typing import NoReturn

import pytest
import ray


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    raise AssertionError("a unit test tried to start Ray: test the core, or mark the test with @pytest.mark.ray")


@pytest.fixture(autouse=True)
def _no_ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.init` raises, also when Ray would call it of itself."""
    if request.node.get_closest_marker("ray") is None:
        monkeypatch.setattr(ray, "init", _refuse)
        monkeypatch.setenv("RAY_ENABLE_AUTO_CONNECT", "0")
