"""The manifests render, satisfy KubeRay's schemas, and start exactly the code and the config that this folder holds."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT.parent / "shared" / "k8s-schemas"
OVERLAYS = {"service": "RayService", "batch": "RayJob"}
CLUSTER_KEY = {"RayService": "rayClusterConfig", "RayJob": "rayClusterSpec"}


def render(overlay: str) -> dict[str, dict[str, Any]]:
    """The objects of an overlay by kind, as a cluster would receive them."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: manifests are not rendered")
    command = ["kubectl", "kustomize", str(ROOT / "k8s" / "overlays" / overlay)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {item["kind"]: item for item in yaml.safe_load_all(text) if item["kind"] != "PersistentVolumeClaim"}


def serve_config() -> dict[str, Any]:
    manifest = yaml.safe_load((ROOT / "k8s/base/service/rayservice.yaml").read_text(encoding="utf-8"))
    config: dict[str, Any] = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    return config


@pytest.mark.parametrize(("overlay", "kind"), OVERLAYS.items())
def test_valid_against_kuberay_schema(overlay: str, kind: str) -> None:
    schema = SCHEMAS / f"{kind}.json"
    if not schema.is_file():
        pytest.skip("the KubeRay schemas are not here: the manifest is not validated")
    validator = jsonschema.Draft7Validator(json.loads(schema.read_text(encoding="utf-8")))
    objects = render(overlay)
    assert list(objects) == [kind]
    assert [f"{list(e.absolute_path)}: {e.message}" for e in validator.iter_errors(objects[kind])] == []


@pytest.mark.parametrize(("overlay", "kind"), OVERLAYS.items())
def test_each_model_has_its_own_worker_group(overlay: str, kind: str) -> None:
    groups = render(overlay)[kind]["spec"][CLUSTER_KEY[kind]]["workerGroupSpecs"]
    config = yaml.safe_load((ROOT / used_config()).read_text(encoding="utf-8"))
    assert [group["groupName"] for group in groups] == [model["name"] for model in config["models"]]


@pytest.mark.parametrize(("overlay", "kind"), OVERLAYS.items())
def test_an_overlay_names_the_image_of_every_container(overlay: str, kind: str) -> None:
    cluster = render(overlay)[kind]["spec"][CLUSTER_KEY[kind]]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = [container["image"] for pod in pods for container in pod["template"]["spec"]["containers"]]
    assert len(images) == 3
    assert set(images) == {"example/specrelay:0.1.0"}


def unknown_keys(model: type[BaseModel], given: dict[str, Any], place: str) -> list[str]:
    return [f"{place}.{key}" for key in given if key not in model.model_fields]


def test_serve_config_has_only_keys_that_serve_knows() -> None:
    """ServeDeploySchema accepts misspelt keys in silence, so they are compared by name."""
    config = serve_config()
    schema = ServeDeploySchema.model_validate(config)
    assert schema.applications[0].import_path == "deployments.app:build_app"
    unknown = unknown_keys(ServeDeploySchema, config, "serveConfigV2")
    unknown += unknown_keys(ServeApplicationSchema, config["applications"][0], "applications[0]")
    unknown += unknown_keys(type(schema.http_options), config["http_options"], "http_options")
    assert unknown == []
    assert unknown_keys(ServeDeploySchema, config | {"aplications": []}, "x") == ["x.aplications"]


def used_config() -> str:
    config: str = serve_config()["applications"][0]["args"]["config"]
    return config


def test_the_job_runs_the_same_config_and_an_absolute_output() -> None:
    manifest = yaml.safe_load((ROOT / "k8s/base/batch/rayjob.yaml").read_text(encoding="utf-8"))
    words = manifest["spec"]["entrypoint"].split()
    assert words[:5] == ["python", "-m", "specrelay", "batch", used_config()]
    assert words[words.index("--output") + 1].startswith("/")


def test_import_path_builds_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._common.utils import import_attr
    from ray.serve import Application
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    application = serve_config()["applications"][0]
    monkeypatch.chdir(ROOT)
    builder = import_attr(application["import_path"])
    built = call_user_app_builder_with_args_if_necessary(builder, application["args"])
    assert isinstance(built, Application)
