"""A small HTTP app that answers as SpecRelay's routes do, on a real socket."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from specrelay.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class Answer:
    """What a route gives: JSON, or the events of a stream."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    events: tuple[str, ...] = ()


Route = Callable[[dict[str, Any]], Answer]


@dataclass(slots=True)
class FakeApp:
    """`routes` by path; `received` holds the bodies that came, in order; `most_at_once` counts requests under way."""

    endpoint: Endpoint
    routes: dict[str, Route] = field(default_factory=dict)
    received: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, body: dict[str, Any], authorization: str | None) -> Answer:
        with self.lock:
            self.received.append(body | {"_authorization": authorization})
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)
        try:
            return self.routes[path](body)
        finally:
            with self.lock:
                self.running -= 1


def _handler(app: FakeApp) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._respond({})

        def do_POST(self) -> None:
            self._respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _respond(self, body: dict[str, Any]) -> None:
            answer = app.answer(self.path, body, self.headers.get("Authorization"))
            payload = json.dumps(answer.body) if not answer.events else "".join(f"data: {e}\n\n" for e in answer.events)
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(payload.encode())))
            self.end_headers()
            self.wfile.write(payload.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    return Handler


@contextmanager
def serving() -> Iterator[FakeApp]:
    """The app on a free port, gone after the block."""
    fake = FakeApp(Endpoint("http://127.0.0.1"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    fake.endpoint = Endpoint(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
