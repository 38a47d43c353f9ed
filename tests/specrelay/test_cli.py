"""Exit codes and error lines, through the real command line."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EMULATED = """
models:
  - {name: small, kind: emulated, emulate: {base_ms: 1, agreement: 0.7}}
  - {name: big, kind: emulated, emulate: {base_ms: 5, agreement: 1.0}}
"""


def specrelay(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specrelay", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "app.yaml"
    path.write_text(EMULATED, encoding="utf-8")
    return path


def only_line(text: str) -> str:
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]


def test_a_misspelt_key_is_refused_with_path_and_nearest_name(config: Path) -> None:
    config.write_text(EMULATED.replace("agreement: 0.7", "agrement: 0.7"), encoding="utf-8")
    done = specrelay("serve", config)
    assert done.returncode == 2
    line = only_line(done.stderr)
    assert line.startswith("error: ")
    assert "models[0].emulate.agrement" in line
    assert "agreement" in line.replace("agrement", "")


@pytest.mark.parametrize("command", ["serve", "plan"])
def test_a_missing_config_is_refused(tmp_path: Path, command: str) -> None:
    done = specrelay(command, tmp_path / "none.yaml")
    assert done.returncode == 2
    assert "none.yaml" in only_line(done.stderr)


def test_missing_weights_are_refused_before_ray_starts(config: Path, tmp_path: Path) -> None:
    config.write_text(f"models:\n  - {{name: m, kind: transformers, source: {tmp_path}/nothing}}\n", encoding="utf-8")
    done = specrelay("serve", config, "--port", "18571")
    assert done.returncode == 2
    assert f"{tmp_path}/nothing" in only_line(done.stderr)
    assert "starting Ray" not in done.stdout


def test_a_bad_batch_is_refused_before_anything_starts(config: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"promt": "b"}\n', encoding="utf-8")
    done = specrelay("batch", config, "--input", prompts, "--output", tmp_path / "out.jsonl")
    assert done.returncode == 2
    assert f"{prompts}:2" in only_line(done.stderr)
    assert not (tmp_path / "out.jsonl").exists()


def test_plan_names_every_model(config: Path) -> None:
    done = specrelay("plan", config)
    assert done.returncode == 0, done.stderr
    assert "small" in done.stdout
    assert "big" in done.stdout


def test_status_without_an_app_fails_later_and_says_how_to_start_one() -> None:
    done = specrelay("status", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "python -m specrelay serve" in only_line(done.stderr)


def test_unknown_commands_and_options_are_refused() -> None:
    assert specrelay("sevre").returncode == 2
    assert specrelay("status", "--nope").returncode == 2
