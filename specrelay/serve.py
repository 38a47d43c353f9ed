"""Start an app from its config, know when it is ready, leave nothing behind: for `serve`, and for `batch`.

The order is that of what can go wrong: config and machine are checked first, weights are prepared once, then Ray
starts, then the deployments. Whatever is refused on the way ends with nothing running.
"""

import json
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview
from rich.console import Console

from cluster.config import AppConfig
from cluster.placement import place
from cluster.preflight import check_resources
from cluster.ray_runtime import joins_cluster, ray_runtime
from deployments.app import build_app
from specrelay.endpoint import Endpoint, endpoint_of
from specrelay.exits import Refused
from specrelay.preparation import Tell, prepare_app
from specrelay.progress import StartProgress
from specrelay.stopping import StopSignals, wait_for_signal

START_TIMEOUT_S = 1800.0
POLL_S = 0.1

ROOT = Path(__file__).parents[1]


def serve_until_stopped(config: AppConfig, console: Console) -> None:
    """Start the app, print how to reach it, serve until a stop signal, stop it."""
    signals = StopSignals()
    signals.install()
    try:
        with StartProgress(console) as tell, started_app(config, signals, tell) as endpoint:
            tell("ready")
            tell.close()
            console.print(ready_text(config, endpoint), highlight=False, markup=False, soft_wrap=True)
            wait_for_signal()
    except KeyboardInterrupt:
        console.print("stopped")


@contextmanager
def started_app(config: AppConfig, signals: StopSignals, tell: Tell) -> Iterator[Endpoint]:
    """The endpoint of an app that runs during the block and is gone after it."""
    prepare_app(config, tell)
    tell("joining Ray" if joins_cluster() else "starting Ray")
    with ExitStack() as stack:
        with signals.held():
            runtime = stack.enter_context(ray_runtime(config.name, config.http.host, config.http.port, ROOT))
        signals.install()
        try:
            if runtime.joined:
                check_resources(place(config, len(runtime.nodes())), runtime.nodes())
            deploy(config, tell)
            yield endpoint_of_app(config)
        finally:
            signals.ignore()
            tell("stopping")


def endpoint_of_app(config: AppConfig) -> Endpoint:
    return endpoint_of(config.http.host, config.http.port, config.security.api_keys_env)


def deploy(config: AppConfig, tell: Tell) -> None:
    """Run the app on the Ray that runs; returns when all deployments are healthy, Refused when one never will be."""
    tell("loading " + ", ".join(model.name for model in config.models))
    target = serve.RunTarget(
        build_app({"config": config.model_dump(mode="json", exclude_unset=True)}), name=config.name, route_prefix="/"
    )
    serve.run_many([target], wait_for_applications_running=False)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    seen: set[str] = set()
    while (status := serve.status().applications[config.name]).status is not ApplicationStatus.RUNNING:
        if status.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            raise Refused(cause_of(status))
        if time.monotonic() > deadline_s:
            raise Refused(f"not ready after {START_TIMEOUT_S:.0f} s: {waiting_for(status)}")
        seen |= tell_healthy(status, seen, tell)
        time.sleep(POLL_S)
    tell_healthy(status, seen, tell)


def tell_healthy(status: ApplicationStatusOverview, seen: set[str], tell: Tell) -> set[str]:
    """Say which deployments became healthy since the last look; returns them."""
    healthy = {name for name, deployment in status.deployments.items() if deployment.status == "HEALTHY"} - seen
    for name in sorted(healthy):
        tell(f"{name} is ready")
    return healthy


def waiting_for(status: ApplicationStatusOverview) -> str:
    late = [f"{name} ({d.status.value.lower()})" for name, d in status.deployments.items() if d.status != "HEALTHY"]
    return ", ".join(late) or status.message


def cause_of(status: ApplicationStatusOverview) -> str:
    """The last line of the first deployment's error that names an exception, without its traceback and module path."""
    messages = [d.message for d in status.deployments.values() if d.status != "HEALTHY" and d.message] or [
        status.message
    ]
    return last_error_line(messages[0])


_EXCEPTION = re.compile(r"([A-Za-z_]\w*\.)+[A-Z]\w*|[A-Z]\w*(Error|Exception)")
"""As tracebacks name one: with its module, where it is not built in."""


def last_error_line(message: str) -> str:
    """`models.weights.WeightsError: no such folder` at the end of a traceback → `no such folder`."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    for line in reversed(lines):
        kind, separator, text = line.partition(": ")
        if separator and _EXCEPTION.fullmatch(kind):
            return text
    return lines[-1] if lines else "the app failed to start; see Ray's logs"


def ready_text(config: AppConfig, endpoint: Endpoint) -> str:
    """The URL, and a curl line to paste."""
    key = ' -H "Authorization: Bearer $KEY"' if config.security.api_keys_env else ""
    messages = [{"role": "user", "content": "Tell me about the sea."}]
    body = json.dumps({"model": config.served_model_id, "stream": True, "messages": messages})
    return (
        f"\n{config.name} serves on {endpoint.url}/v1 · Ctrl-C stops it\n\n"
        f"curl -N {endpoint.url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}\n"
    )
