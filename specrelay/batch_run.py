"""`batch` from end to end: find the running app, or start one for the time of the batch; then run the rows.

Which app counts as running: the one that answers on the config's address. Its `/health` names the hash of its config.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.config import AppConfig, config_hash
from specrelay.batch import Limits, run_batch
from specrelay.batch_rows import Row
from specrelay.endpoint import CONNECT_TIMEOUT_S, Endpoint, json_object
from specrelay.exits import Failed, Refused
from specrelay.progress import StartProgress
from specrelay.serve import endpoint_of_app, started_app
from specrelay.stopping import StopSignals


def run_with_app(config: AppConfig, rows: list[Row], output: Path, concurrency: int, console: Console) -> None:
    """Failed when a row ended in an error; the output is whole then too."""
    signals = StopSignals()
    signals.install()
    limits = Limits(concurrency, config.http.deadline_s)
    with app_for(config, signals, console) as endpoint, counted(console, len(rows)) as done:
        errors = asyncio.run(run_batch(endpoint, rows, output, limits, done))
    if errors:
        raise Failed(f"{errors} of {len(rows)} requests ended in an error; see {output}")
    console.print(f"{len(rows)} answers in {output}", highlight=False)


@contextmanager
def app_for(config: AppConfig, signals: StopSignals, console: Console) -> Iterator[Endpoint]:
    running = running_app(endpoint_of_app(config), config_hash(config))
    if running is not None:
        console.print(f"using the app that runs at {running.url}", highlight=False)
        yield running
        return
    with StartProgress(console) as tell, started_app(config, signals, tell) as endpoint:
        tell.close()
        yield endpoint


def running_app(endpoint: Endpoint, wanted_hash: str) -> Endpoint | None:
    """The endpoint itself if an app with that config answers there, None if nobody does; else Refused."""
    try:
        response = httpx.get(endpoint.url + "/health", headers=endpoint.headers, timeout=CONNECT_TIMEOUT_S)
        if _is_serve_without_app(response, endpoint):
            return None
    except httpx.ConnectError:
        return None
    except httpx.TransportError as error:
        raise Refused(f"what answers at {endpoint.url} is not SpecRelay ({error}): choose another port") from error
    found = json_object(response, endpoint).get("config_hash")
    if found != wanted_hash:
        raise Refused(
            f"the app at {endpoint.url} runs another config (hash {found}, wanted {wanted_hash}): "
            "stop it, or set another http.port"
        )
    return endpoint


def _is_serve_without_app(health: httpx.Response, endpoint: Endpoint) -> bool:
    """Ray Serve goes on listening on a cluster after its last app was removed."""
    if health.status_code != httpx.codes.NOT_FOUND:
        return False
    routes = httpx.get(endpoint.url + "/-/routes", timeout=CONNECT_TIMEOUT_S)
    return routes.status_code == httpx.codes.OK and routes.text.strip() == "{}"


@contextmanager
def counted(console: Console, total: int) -> Iterator[Callable[[], None]]:
    columns = (TextColumn("requests"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda: progress.advance(task)
