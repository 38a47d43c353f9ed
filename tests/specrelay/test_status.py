import io
from typing import Any

import pytest
from rich.console import Console

from specrelay.endpoint import Endpoint, endpoint_at, endpoint_of
from specrelay.exits import Failed, Refused
from specrelay.status import show_status
from tests.specrelay.fake_app import Answer, FakeApp

TABLE: dict[str, Any] = {
    "chain": [["m1", "m2"], "m70"],
    "windows": [4],
    "generation": 3,
    "explore_share": 0.034,
    "models": [
        {
            "name": "m70",
            "level": 2,
            "base_ms": 45.12,
            "per_token_ms": 0.5,
            "per_sequence_ms": 0.0,
            "queue": 2,
            "replicas": [
                {
                    "id": "m70#a",
                    "node": "n1",
                    "sequences": 5,
                    "kv_used_tokens": 640,
                    "kv_total_tokens": 4096,
                    "up": True,
                },
                {
                    "id": "m70#b",
                    "node": "n2",
                    "sequences": 0,
                    "kv_used_tokens": 0,
                    "kv_total_tokens": 4096,
                    "up": False,
                },
            ],
        },
        {"name": "m1", "level": 1, "base_ms": 2.0, "per_token_ms": 0, "per_sequence_ms": 0, "queue": 0, "replicas": []},
    ],
    "pairs": [
        {
            "lower": "m1",
            "upper": "m70",
            "class": "code",
            "regime": "greedy",
            "divergence": None,
            "acceptance": 0.7251,
            "samples": 90,
        }
    ],
    "candidates": [
        {"chain": ["m70"], "windows": [], "predicted_ms_per_token": 45.6, "measured_ms_per_token": None, "rounds": 0}
    ],
}


def shown(app: FakeApp) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    show_status(app.endpoint, console)
    return console.export_text()


def test_every_part_of_the_table_is_shown(app: FakeApp) -> None:
    app.routes["/router/table"] = lambda body: Answer(TABLE)
    text = shown(app)
    assert "m1+m2 → m70  windows 4  generation 3  explore 3.4%" in text
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert rows == [
        ["m70", "2", "45.1", "0.5", "0", "2", "m70#a", "n1", "5", "640/4096", "yes"],
        ["", "", "", "", "", "", "m70#b", "n2", "0", "0/4096", "no"],
        ["m1", "1", "2", "0", "0", "0", "none", "", "", "", "no"],
        ["m1", "m70", "code", "greedy", "–", "0.725", "90"],
        ["m70", "", "45.6", "–", "0"],
    ]


def test_nobody_there_is_a_failure_that_says_how_to_start(app: FakeApp) -> None:
    with pytest.raises(Failed, match="python -m specrelay serve"):
        show_status(Endpoint("http://127.0.0.1:9"), Console())


def test_something_else_there_is_refused(app: FakeApp) -> None:
    app.routes["/router/table"] = lambda body: Answer(["not", "ours"])
    with pytest.raises(Refused, match="not SpecRelay"):
        show_status(app.endpoint, Console())


def test_an_endpoint_reaches_what_a_server_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "first, second")
    assert endpoint_of("0.0.0.0", 8000) == Endpoint("http://127.0.0.1:8000", {})
    assert endpoint_of("::", 1, "KEYS") == Endpoint("http://[::1]:1", {"Authorization": "Bearer first"})
    assert endpoint_of("10.0.0.2", 1, "UNSET_VARIABLE").headers == {}


@pytest.mark.parametrize("url", ["http://host:81", "http://host:81/", "http://host:81/v1", "host:81", "host:81/v1/"])
def test_an_address_is_taken_as_people_write_it(url: str) -> None:
    assert endpoint_at(url).url == "http://host:81"
