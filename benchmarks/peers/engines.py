"""What is measured, started once and asked many times: a peer in an environment of its own, or SpecRelay over HTTP."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import yaml

from models.cache import default_cache_dir

ROOT = Path(__file__).parents[2]
WORKERS = Path(__file__).with_name("workers.py")
START_S = 600.0
ANSWER_S = 300.0
INSTALL_S = 3600.0


class Unavailable(Exception):
    """The engine cannot be had here; the table goes on without it."""


@dataclass(frozen=True, slots=True)
class Packages:
    """What pip installs, and what of it is removed again because the peer fails to import beside it."""

    install: tuple[str, ...]
    remove: tuple[str, ...] = ()


class Engine(Protocol):
    def answer(self, prompts: Sequence[list[int]], count: int) -> float:
        """Seconds until each of these prompts, asked at once, has its `count` tokens."""
        ...


class Peer:
    """A worker process; `packages` are installed into an environment kept between runs, none means our own."""

    def __init__(self, kind: str, source: str, packages: Packages | None) -> None:
        python = environment(kind.split("-", maxsplit=1)[0], packages) if packages else Path(sys.executable)
        self._lines: queue.Queue[str] = queue.Queue(maxsize=16)
        self._process = subprocess.Popen(
            [python, WORKERS, kind, source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # some peers start processes of their own, which must end with it
        )
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._reply(START_S)
        except Unavailable:
            self.stop()
            raise

    def answer(self, prompts: Sequence[list[int]], count: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": count}) + "\n")
        self._process.stdin.flush()
        reply = self._reply(ANSWER_S)
        assert reply["counts"] == [count] * len(prompts), reply
        seconds: float = reply["seconds"]
        return seconds

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _reply(self, limit_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            raise Unavailable(f"no reply within {limit_s:.0f} s") from None
        if not line:
            raise Unavailable(f"its process ended with {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply


class App:
    """SpecRelay as its users start it; `config` as in a file, which is written to `path`."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        port = _free_port()
        path.write_text(yaml.safe_dump(dict(config)))
        self.name = path.stem
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S)
        self._log = path.with_suffix(".log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "specrelay", "serve", path, "--port", str(port)],
            cwd=ROOT,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._wait()

    def stop(self) -> None:
        self.client.close()
        self._process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(60.0)
        self._process.kill()
        self._log.close()

    def _wait(self) -> None:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            with suppress(httpx.HTTPError):
                if self.client.get("/health").status_code == httpx.codes.OK:
                    return
            time.sleep(0.5)
        self.stop()
        raise Unavailable(f"{self.name} did not start: {Path(self._log.name).read_text()[-500:]}")


class Served:
    """An app asked with one kind of speculation."""

    def __init__(self, app: App, speculation: Mapping[str, Any]) -> None:
        self._client = app.client
        self._asked = {"model": app.name, "temperature": 0, "ignore_eos": True, "speculation": dict(speculation)}

    def answer(self, prompts: Sequence[list[int]], count: int) -> float:
        def ask(prompt: list[int]) -> int:
            body = {**self._asked, "prompt": prompt, "max_tokens": count}
            response = self._client.post("/v1/completions", json=body).raise_for_status()
            made: int = response.json()["usage"]["completion_tokens"]
            return made

        started_s = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as askers:
            counts = list(askers.map(ask, prompts))
        took_s = time.perf_counter() - started_s
        assert counts == [count] * len(prompts), counts
        return took_s


def environment(name: str, packages: Packages) -> Path:
    """The interpreter of a virtual environment with these packages; made at the first run. Raises Unavailable."""
    folder = default_cache_dir() / "peers" / name
    python, mark = folder / "bin" / "python", folder / ".installed"
    if mark.exists() and mark.read_text() == repr(packages):
        return python
    print(f"installing {', '.join(packages.install)} into {folder}", flush=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=INSTALL_S)
        pip = [str(python), "-m", "pip", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", *packages.install], check=True, timeout=INSTALL_S)
        if packages.remove:
            subprocess.run([*pip, "uninstall", "--yes", *packages.remove], check=True, timeout=INSTALL_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"it cannot be installed: {error}") from None
    mark.write_text(repr(packages))
    return python


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
