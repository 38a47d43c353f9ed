"""What of a config is the router's, and what of it can change while the app runs."""

from pathlib import Path
from typing import Any

import pytest

from cluster.config import load_config
from cluster.config_errors import ConfigError
from deployments.router import changed_settings

DATA = load_config(Path(__file__).parents[2] / "configs/emulated.yaml").model_dump(mode="json", exclude_unset=True)


def test_values_given_while_it_runs_win_and_others_stay() -> None:
    settings = changed_settings(DATA, {"slo_ms_per_token": 25.0, "explore": 0.1})
    assert (settings.slo_ms_per_token, settings.explore) == (25.0, 0.1)
    assert settings.models == ("m68", "m1b", "m8b", "m70b")
    assert (settings.policy, settings.max_window) == ("adaptive", 16)
    fixed = changed_settings(DATA, {"policy": "fixed", "chain": ["m8b", "m70b"], "windows": [4]})
    assert (fixed.policy, fixed.chain, fixed.windows) == ("fixed", ("m8b", "m70b"), (4,))


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"explore": 1.5}, "router.explore"),
        ({"exlpore": 0.1}, "router.exlpore"),
        ({"slo_ms_per_token": 0}, "router.slo_ms_per_token"),
        ({"policy": "fixed"}, "router.chain"),
        ({"remember": False}, "router.remember"),
        ({"chain": ["m8b", "m70b"]}, "router.chain"),
    ],
)
def test_wrong_values_are_named(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        changed_settings(DATA, changes)
    assert caught.value.path == path
