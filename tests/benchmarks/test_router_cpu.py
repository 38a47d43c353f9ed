"""The measurement of the router's processor time: stubs agree as often as they say, and every path runs."""

import pytest

from benchmarks import router_cpu
from benchmarks.stub_peers import MODELS, StubModel

SEQUENCES, REPLICAS = 3, 4


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_cpu, "WARM_UP_S", 0.0)
    monkeypatch.setattr(router_cpu, "MEASURED_S", 1.0)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_stub_is_right_as_often_as_its_agreement(model: StubModel) -> None:
    samples = [model.sample(seq, position) for seq in range(1 << 40, (1 << 40) + 50) for position in range(200)]
    assert sum(samples) / len(samples) == pytest.approx(model.agreement, abs=0.02)


async def test_without_streams() -> None:
    cost = await router_cpu.without_streams(SEQUENCES, REPLICAS)
    assert 0.0 < cost.frames_us < cost.cpu_us
    assert 1.0 <= cost.levels <= len(MODELS)


async def test_with_streams() -> None:
    cost = await router_cpu.with_streams(SEQUENCES, REPLICAS)
    assert cost.cpu_us > 0.0
    assert 1.0 <= cost.levels <= len(MODELS)
