"""Ray of one's own starts, serves and leaves nothing; a given cluster is joined and outlives the app."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from cluster.config_errors import PreflightError
from cluster.preflight import available_cpus
from cluster.ray_runtime import RayTimeoutError, _start, _within, joins_cluster, ray_runtime

ROOT = Path(__file__).parents[2]

APP = """
import json, os, subprocess, sys
from pathlib import Path
import ray
from ray import serve
from cluster.config_errors import PreflightError
from cluster.preflight import available_cpus
from cluster.ray_runtime import ray_runtime

@serve.deployment(ray_actor_options={"num_cpus": 0})
class Where:
    def __call__(self):
        import kvstate.protocol
        return kvstate.protocol.__file__

app, port, root = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])

def second(name, port):
    joining = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "RAY_AUTH_MODE": "token"}
    command = [sys.executable, __file__, name, str(port), str(root)]
    done = subprocess.run(command, env=os.environ | joining, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines() or [done.stderr]

try:
    with ray_runtime(app, "127.0.0.1", port, root) as runtime:
        file = serve.run(Where.bind(), name=app, route_prefix=f"/{app}").remote().result(timeout_s=30)
        print(json.dumps({"app": app, "joined": runtime.joined, "cpus": runtime.nodes()[0].cpus, "file": file}))
        if app == "first":
            print("\\n".join(second("second", port) + second("third", port + 1) + second("first", port)))
            print(json.dumps({"apps": sorted(serve.status().applications)}))
except PreflightError as error:
    print(json.dumps({"refused": str(error)}))
print(json.dumps({"app": app, "up": ray.is_initialized()}))
"""


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_JOB_ID", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_cluster")
def test_a_cluster_is_joined_only_where_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not joins_cluster()
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert not joins_cluster()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert joins_cluster()
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert joins_cluster()


@pytest.mark.usefixtures("_no_cluster")
def test_a_port_in_use_is_refused_before_ray_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with pytest.raises(PreflightError, match=str(port)), ray_runtime("app", "127.0.0.1", port, ROOT):
            pass


@pytest.mark.usefixtures("_no_cluster")
def test_an_address_without_cluster_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port}")
    with pytest.raises(PreflightError) as caught, ray_runtime("app", "127.0.0.1", 8000, ROOT):
        pass
    assert f"127.0.0.1:{free_port}" in str(caught.value)
    assert "unset RAY_ADDRESS" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_step_without_end_is_a_timeout_and_errors_come_through() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        with pytest.raises(RayTimeoutError, match=r"waiting took more than 0\.05 s"):
            _within(0.05, "waiting", listener.accept)
    with pytest.raises(ZeroDivisionError):
        _within(1.0, "dividing", lambda: 1 / 0)
    with pytest.raises(TimeoutError, match="own"):
        _within(1.0, "failing", _raise_timeout)


def test_a_ray_that_does_not_start_is_ended_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises Exception itself when its raylet is late, and leaves the processes it started."""
    started: list[subprocess.Popen[bytes]] = []

    def late(**given: object) -> None:
        started.append(subprocess.Popen(["sleep", "600"]))
        raise Exception("The current node timed out during startup.\nMore.")  # noqa: TRY002 - as Ray does

    monkeypatch.setattr(ray, "init", late)
    with pytest.raises(PreflightError, match=r"3 attempts \(The current node timed out during startup\.\): its logs"):
        _start()
    assert [process.poll() is not None for process in started] == [True] * 3

    def third_time(**given: object) -> None:
        if len(started) < 5:
            late()

    monkeypatch.setattr(ray, "init", third_time)
    _start()
    assert [process.poll() is not None for process in started] == [True] * 5


def _raise_timeout() -> None:
    raise TimeoutError("own")


@pytest.mark.ray
@pytest.mark.usefixtures("_no_cluster")
def test_own_ray_is_left_without_a_trace_and_a_given_one_outlives_the_app(tmp_path: Path, free_port: int) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    script = tmp_path / "app.py"
    script.write_text(APP)
    command = [sys.executable, str(script), "first", str(free_port), str(ROOT)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 9, done.stdout + done.stderr
    first, second, second_end, refused, third_end, taken, taken_end, apps, first_end = lines
    assert (first["app"], first["joined"], first["file"]) == ("first", False, f"{ROOT}/kvstate/protocol.py")
    assert first["cpus"] == available_cpus()
    assert (second["app"], second["joined"]) == ("second", True)
    assert second["file"].endswith("/kvstate/protocol.py")
    assert f"127.0.0.1:{free_port}," in refused["refused"]
    assert f"127.0.0.1:{free_port + 1}:" in refused["refused"]
    assert "an app named first is there already (RUNNING)" in taken["refused"]
    assert apps == {"apps": ["first"]}, "the refused process removed what is not its own"
    assert [end["up"] for end in (second_end, third_end, taken_end, first_end)] == [False] * 4
    assert not (tmp_path / ".ray").exists()
    assert _processes_naming(str(tmp_path)) == []


def _processes_naming(text: str) -> list[str]:
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if text in line]
