"""Placements follow the config alone."""

from ray.serve._private.config import ReplicaConfig

from cluster.config import AppConfig, parse_config
from cluster.placement import place


def _config() -> AppConfig:
    resources = {"cpus": 2.0, "gpus": 0.5, "accelerator_type": "A100", "labels": {"zone": "a"}}
    target = {"name": "large", "kind": "transformers", "source": "org/m", "replicas": 3, "resources": resources}
    return parse_config({"models": [{"name": "ngram", "kind": "ngram"}, target]}, "app")


def test_one_placement_per_model_in_order() -> None:
    ngram, large = place(_config())
    assert (ngram.model, ngram.level, ngram.num_replicas) == ("ngram", 1, 1)
    assert (large.model, large.level, large.num_replicas) == ("large", 2, 3)
    assert ngram.ray_actor_options == {"num_cpus": 0.0, "num_gpus": 0.0}
    assert large.ray_actor_options == {
        "num_cpus": 2.0,
        "num_gpus": 0.5,
        "accelerator_type": "A100",
        "label_selector": {"zone": "a"},
    }


def test_replicas_are_kept_apart_only_where_nodes_suffice() -> None:
    assert [placement.max_replicas_per_node for placement in place(_config(), num_nodes=2)] == [None, None]
    assert [placement.max_replicas_per_node for placement in place(_config(), num_nodes=3)] == [None, 1]


def test_serve_accepts_the_options() -> None:
    for placement in place(_config()):
        options = ReplicaConfig.create(lambda: None, ray_actor_options=placement.ray_actor_options).ray_actor_options
        assert options["num_cpus"] == placement.cpus
