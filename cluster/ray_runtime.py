"""Joining or starting Ray and Serve, and leaving nothing behind.

    with ray_runtime("app", "127.0.0.1", 8000, root) as runtime:
        serve.run(…, name="app")

Inside a Ray job, or with RAY_ADDRESS set, the cluster that is there is joined, and at the end only the own app is
removed. Otherwise a Ray of its own is started on this machine and stopped. Every wait has a deadline.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import ray
from ray import serve
from ray.exceptions import AuthenticationError
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.context import _get_global_client

from cluster.config_errors import PreflightError, RefusedError
from cluster.preflight import NodeCapacity, available_cpus, check_port
from cluster.priority import giving_way

logger = logging.getLogger(__name__)
T = TypeVar("T")

_REACH_S = 5.0
_JOIN_S = 60.0
_START_ATTEMPTS = 3
_START_S = 120.0
_STOP_S = 60.0
_OWN_RAY = {
    "RAY_worker_niceness": "0",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
}
"""Unless they are set. Nothing else on this machine matters more than the models, and what Serve does by the clock,
its control loop and the metrics of each of its replicas, takes time from them.
"""
_NOT_UPLOADED = [".git", ".venv", ".ci", "tests", "docs", "k8s", "**/__pycache__", ".*_cache"]


class RayTimeoutError(RefusedError):
    """Ray did not do `what` within `limit_s`."""

    def __init__(self, what: str, limit_s: float) -> None:
        super().__init__(what, limit_s)
        self.what = what
        self.limit_s = limit_s

    def __str__(self) -> str:
        return f"{self.what} took more than {self.limit_s:g} s"


@dataclass(frozen=True, slots=True)
class RayRuntime:
    """`joined`: the cluster was there before and outlives the app."""

    joined: bool

    def nodes(self) -> tuple[NodeCapacity, ...]:
        """What the living nodes offer in all, whether in use or not."""
        return tuple(_capacity(node) for node in ray.nodes() if node["Alive"])


def joins_cluster() -> bool:
    """Whether a cluster is given: by RAY_ADDRESS, which Ray also sets for the processes of a job."""
    return os.environ.get("RAY_ADDRESS", "local") not in ("", "local") or _in_ray_job()


@contextlib.contextmanager
def ray_runtime(app: str, host: str, port: int, root: Path) -> Iterator[RayRuntime]:
    """Ray and Serve ready at host:port; `root` is the folder that worker processes import from.

    Raises PreflightError when the port is taken, no cluster answers, or a Serve is there with another host or port,
    or with an app of this name: it belongs to someone else, and is neither replaced nor removed.
    """
    joined = joins_cluster()
    owned = False
    if not joined:
        check_port(host, port)
    with _own_environment(root) if not joined else contextlib.nullcontext():
        try:
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            _join(root) if joined else _start()
            _start_serve(host, port)
            _refuse_present(app)
            owned = True
            yield RayRuntime(joined)
        finally:
            _leave(app if owned else None)


def connect(root: Path) -> None:
    """Join the cluster without starting anything, for commands that only look. Raises PreflightError."""
    _join(root)


def _start() -> None:
    """Quiet, and without dashboard: jobs are submitted to clusters that are there already.

    In the calling thread, unlike all other steps: the kernel ends Ray's processes with the thread that started them.
    Ray waits for each of its processes with a limit of its own, half a minute, which a busy machine or a process that
    failed to come up can exceed; what it had started by then is ended and the start tried again.
    """
    for attempt in range(1, _START_ATTEMPTS + 1):
        before = set(psutil.Process().children(recursive=True))
        try:
            with giving_way():
                _init()
        except Exception as error:
            _end(set(psutil.Process().children(recursive=True)) - before)
            if attempt == _START_ATTEMPTS:
                cause = next(iter(str(error).splitlines()), type(error).__name__)
                fix = "its logs are in the folder session_latest of Ray's temporary folder (/tmp/ray)"
                raise PreflightError(f"Ray did not start in {attempt} attempts ({cause}): {fix}") from error
            logger.warning("Ray did not start (%s): attempt %d of %d", error, attempt + 1, _START_ATTEMPTS)
        else:
            return


def _init() -> None:
    ray.init(
        address="local",
        num_cpus=available_cpus(),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace="specrelay",
    )


def _end(processes: set[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_STOP_S)


def _join(root: Path) -> None:
    """A job already has its working_dir; any other driver uploads the root, so that all nodes run the same code."""
    runtime_env = None if _in_ray_job() else {"working_dir": str(root), "excludes": _NOT_UPLOADED}
    address = os.environ.get("RAY_ADDRESS", "auto")
    _check_reachable(address)
    try:
        _within(
            _JOIN_S,
            f"joining the Ray cluster at {address}",
            lambda: ray.init(
                address=address,
                runtime_env=runtime_env,
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace="specrelay",
            ),
        )
    except AuthenticationError as error:
        fix = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the token of the cluster"
        raise PreflightError(f"the Ray cluster at {address} asks for a token: {fix}") from error
    except (ConnectionError, RayTimeoutError, RuntimeError, ValueError) as error:
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        fix = "start it, or unset RAY_ADDRESS to run on this machine"
        raise PreflightError(f"cannot join the Ray cluster at {address} ({cause}): {fix}") from error


def _check_reachable(address: str) -> None:
    """Ray itself tries for a minute and then ends the process. Addresses without host and port are left to it."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        fix = "start it, or unset RAY_ADDRESS to run on this machine"
        raise PreflightError(f"no Ray cluster answers at {address} ({error.strerror or error}): {fix}") from error


def _start_serve(host: str, port: int) -> None:
    """Serve ignores the address it is given when one is running, so that is looked at first."""
    running = _within(_START_S, "looking for Serve", lambda: _get_global_client(raise_if_no_controller_running=False))
    if running is not None:
        there = running.http_config
        if (there.host, there.port) != (host, port):
            raise PreflightError(
                f"Serve runs there at {there.host}:{there.port}, the config says {host}:{port}: "
                "set http.host and http.port to the same"
            )
        return
    options = HTTPOptions(host=host, port=port)
    _within(
        _START_S, "starting Serve", lambda: serve.start(proxy_location=ProxyLocation.EveryNode, http_options=options)
    )


def _refuse_present(app: str) -> None:
    """Whatever its state: an app that failed or is going is still someone's."""
    present = _within(_START_S, "looking for apps", lambda: serve.status().applications)
    if app in present:
        raise PreflightError(
            f"an app named {app} is there already ({present[app].status.value}): "
            "set another name in the config, or remove that app first"
        )


def _leave(app: str | None) -> None:
    """Goes on to the next step when one fails: nothing is to stay behind. An own Ray ends with the disconnection.

    `app` is None where this process deployed none.
    """
    if not ray.is_initialized():
        return
    steps: list[tuple[str, Callable[[], None]]] = [("disconnecting from Ray", ray.shutdown)]
    if app is not None:
        steps.insert(0, (f"removing app {app}", partial(_delete_app, app)))
    for what, step in steps:
        try:
            _within(_STOP_S, what, step)
        except Exception as error:  # noqa: BLE001 - whatever it is, the next step must run
            logger.warning("%s failed: %s", what, error)


def _delete_app(app: str) -> None:
    """Serve may be gone or never have come up; asking for its status would start one."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is not None:
        client.delete_apps([app], blocking=True)


@contextlib.contextmanager
def _own_environment(root: Path) -> Iterator[None]:
    """What the processes of an own Ray inherit: workers import from `root`.

    Ray protects the ports of a Ray of one's own with a token. Given here, it is not written to the home folder, where
    it would turn token authentication on for every later `ray start` of this user. It stays for the life of this
    process, because Ray caches it. To connect from elsewhere, set RAY_AUTH_TOKEN beforehand.
    """
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    inherited = os.environ.get("PYTHONPATH")
    wanted = {
        "PYTHONPATH": os.pathsep.join([str(root), *([inherited] if inherited else [])]),
        "RAY_USAGE_STATS_ENABLED": "0",
    } | {name: os.environ.get(name, value) for name, value in _OWN_RAY.items()}
    before = {name: os.environ.get(name) for name in (*wanted, "RAY_AUTH_MODE")}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _in_ray_job() -> bool:
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ or "RAY_JOB_ID" in os.environ


def _capacity(node: dict[str, dict[str, float]]) -> NodeCapacity:
    resources = node["Resources"]
    prefix = "accelerator_type:"
    types = frozenset(name.removeprefix(prefix) for name in resources if name.startswith(prefix))
    labels = {key: str(value) for key, value in node.get("Labels", {}).items()}
    return NodeCapacity(resources.get("CPU", 0.0), resources.get("GPU", 0.0), types, labels)


def _within(limit_s: float, what: str, step: Callable[[], T]) -> T:
    """Runs the step in a thread, since Ray's calls have no deadline of their own; late, it is left to end by itself."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(step())
        except BaseException as error:  # noqa: BLE001 - raised again for the caller
            result.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    try:
        return result.result(limit_s)
    except FutureTimeoutError as error:
        if result.done():
            raise
        raise RayTimeoutError(what, limit_s) from error
