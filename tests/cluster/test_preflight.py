"""Each check passes what can run and refuses the rest in one line that names the cause."""

import socket

import pytest

from cluster.config import SecurityConfig, parse_config
from cluster.config_errors import PreflightError
from cluster.placement import Placement, place
from cluster.preflight import (
    NodeCapacity,
    Vocabulary,
    check_port,
    check_resources,
    check_secrets,
    check_vocabularies,
    machine_capacity,
)


def _placement(cpus: float = 0.0, gpus: float = 0.0, replicas: int = 1, accelerator: str | None = None) -> Placement:
    resources = {"cpus": cpus, "gpus": gpus, "accelerator_type": accelerator}
    model = {"name": "m", "kind": "transformers", "source": "org/m", "replicas": replicas, "resources": resources}
    return place(parse_config({"models": [model]}, "app"))[0]


def test_a_free_port_passes_and_one_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with pytest.raises(PreflightError, match=rf"127\.0\.0\.1:{port} .*--port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


def test_a_host_that_is_not_of_this_machine_is_named() -> None:
    with pytest.raises(PreflightError, match=r"192\.0\.2\.1"):
        check_port("192.0.2.1", 8000)


def test_sums_beyond_the_cluster_name_both_numbers() -> None:
    nodes = [NodeCapacity(4, 0), NodeCapacity(2, 1)]
    check_resources([_placement(cpus=2, replicas=3)], nodes)
    with pytest.raises(PreflightError, match="need 8 cpus, the cluster has 6"):
        check_resources([_placement(cpus=2, replicas=3), _placement(cpus=2)], nodes)
    with pytest.raises(PreflightError, match=r"need 1\.5 gpus, the cluster has 1"):
        check_resources([_placement(gpus=0.5, replicas=3)], nodes)


def test_a_replica_larger_than_every_node_is_named() -> None:
    with pytest.raises(PreflightError, match=r"replica of m \(5 cpus, 0 gpus\): the largest have 4 cpus"):
        check_resources([_placement(cpus=5)], [NodeCapacity(4, 0), NodeCapacity(4, 0)])


def test_an_accelerator_type_that_no_node_has_is_named() -> None:
    node = NodeCapacity(8, 2, frozenset({"T4"}))
    check_resources([_placement(gpus=1, accelerator="T4")], [node])
    with pytest.raises(PreflightError, match=r"accelerator type A100\): .*accelerator types T4"):
        check_resources([_placement(gpus=1, accelerator="A100")], [node])


def test_this_machine_has_cpus() -> None:
    assert machine_capacity().cpus >= 1
    check_resources([_placement(cpus=1)], [machine_capacity()])


def test_a_secret_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    security = SecurityConfig(api_keys_env="SPECRELAY_TEST_KEYS")
    monkeypatch.setenv("SPECRELAY_TEST_KEYS", "one,two")
    check_secrets(security)
    for value in ("", " "):
        monkeypatch.setenv("SPECRELAY_TEST_KEYS", value)
        with pytest.raises(PreflightError, match=r"security\.api_keys_env: .* SPECRELAY_TEST_KEYS is not set"):
            check_secrets(security)


def test_vocabularies_may_differ_in_size_but_not_in_meaning() -> None:
    target = Vocabulary("large", "f1", ["a", "b", "c", "d"])
    check_vocabularies([Vocabulary("same", "f1", []), target])
    check_vocabularies([Vocabulary("shorter", "f2", ["a", "b", "c"]), target])
    check_vocabularies([target, Vocabulary("shorter target", "f2", ["a", "b", "c"])])
    with pytest.raises(PreflightError, match=r"small and large disagree at token 2 \('x', 'c'\)"):
        check_vocabularies([Vocabulary("small", "f3", ["a", "b", "x", "y"]), target])
