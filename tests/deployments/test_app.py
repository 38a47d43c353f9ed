"""The whole app on a Ray of its own: emulated models, real actors, sockets and HTTP."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from cluster.config import AppConfig, load_config, with_port
from cluster.ray_runtime import ray_runtime
from kvstate.protocol import Sampling
from models.backend import Slice
from models.emulated import EmulatedBackend, EmulateSpec
from specrelay.serve import deploy

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
PROMPT = "The lighthouse keeper wrote"
TARGET = "m70b"
FIXED = {"mode": "fixed", "chain": ["m1b", "m8b", TARGET], "windows": [3, 4]}


class App:
    """A running app and its HTTP client."""

    def __init__(self, config: AppConfig) -> None:
        self.config = config
        self._handles: dict[str, Any] = {}
        self.url = f"http://127.0.0.1:{config.http.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60.0)

    def call(self, deployment: str, method: str) -> Any:
        """What a method of a deployment's replica returns; waits while Serve restarts it."""
        if deployment not in self._handles:  # a new handle takes a while to find its replica
            self._handles[deployment] = serve.get_deployment_handle(deployment, self.config.name)
        return getattr(self._handles[deployment], method).remote().result(timeout_s=20.0)

    def kill(self, deployment: str) -> None:
        os.kill(self.call(deployment, "pid"), signal.SIGKILL)

    def complete(self, **fields: Any) -> dict[str, Any]:
        response = self.http.post("/v1/completions", json={"model": self.config.name, "prompt": PROMPT} | fields)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    config = with_port(load_config(ROOT / "configs/emulated.yaml"), port)
    with ray_runtime(config.name, config.http.host, port, ROOT):
        deploy(config, lambda _: None)
        running = App(config)
        eventually(lambda: running.http.get("/health").status_code == 200, 20.0)
        eventually(lambda: len(running.call("KVCoordinator", "registered")) == len(config.models), 20.0)
        yield running
        running.http.close()


def reference(num_tokens: int, prompt: str = PROMPT) -> str:
    """The target alone, token by token, without any of the app's parts."""
    backend = EmulatedBackend(TARGET, 4, EmulateSpec(base_ms=0.0, agreement=1.0), 64, 16, sleep=lambda _: None)
    tokens = list(prompt.encode())
    prompt_len = len(tokens)
    for _ in range(num_tokens):
        end = len(tokens)
        start = 0 if end == prompt_len else end - 1
        [[token]] = backend.forward([Slice(tokens, start, end, end - 1, prompt_len, range(64), Sampling())])
        assert token is not None
        tokens.append(token)
    return bytes(tokens[prompt_len:]).decode()


def eventually(holds: Callable[[], bool], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {limit_s} s"
        time.sleep(0.05)


def test_text_is_the_targets_own_whatever_drafts(app: App) -> None:
    cascade = {"mode": "fixed", "chain": [f"m8b+{FIXED['chain'][0]}", TARGET]}
    for speculation in ({"mode": "off"}, {"mode": "auto"}, FIXED, cascade):
        answer = app.complete(max_tokens=40, speculation=speculation)
        assert answer["choices"][0]["text"] == reference(40), speculation
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_stand_beside_every_token_that_is_counted(app: App, stream: bool) -> None:
    body = {"model": app.config.name, "prompt": PROMPT, "max_tokens": 12, "logprobs": 2, "speculation": FIXED}
    if stream:
        lines = app.http.post("/v1/completions", json=body | {"stream": True}).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    else:
        chunks = [app.http.post("/v1/completions", json=body).json()]
    columns = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert "".join(token for c in columns for token in c["tokens"]) == reference(12)
    assert [logprob for c in columns for logprob in c["token_logprobs"]] == [0.0] * 12  # a point mass, by contract
    assert [offset for c in columns for offset in c["text_offset"]] == list(range(12))


def test_echo_puts_the_prompt_before_the_text(app: App) -> None:
    assert app.complete(max_tokens=5, echo=True)["choices"][0]["text"] == PROMPT + reference(5)


def test_spec_metrics_count_at_the_target(app: App) -> None:
    answer = app.complete(max_tokens=40, speculation=FIXED, include_spec_metrics=True)
    counts = answer["metrics"]["speculative_decoding"]
    assert counts["chain"] == FIXED["chain"]
    assert counts["num_accepted_draft_tokens"] > 0
    assert sum(counts["acceptance_histogram"]) == counts["num_spec_steps"] == counts["rounds"] < 40
    off = app.complete(max_tokens=10, speculation={"mode": "off"}, include_spec_metrics=True)
    assert off["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_choices_come_side_by_side_and_usage_counts_all(app: App) -> None:
    """Seeds change nothing of an emulated text; that choices have their own is tested where sampling is."""
    answer = app.complete(max_tokens=12, n=3, include_spec_metrics=True)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(i, reference(12)) for i in range(3)]
    assert answer["usage"]["completion_tokens"] == 36
    assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] >= 3
    with OpenAI(base_url=app.url + "/v1", api_key="none", max_retries=0) as client:
        stop = reference(30)[20:24]
        chunks = list(
            client.completions.create(
                model=app.config.name, prompt=PROMPT, max_tokens=30, n=2, stop=[stop], stream=True
            )
        )
    texts = ["".join(c.choices[0].text for c in chunks if c.choices[0].index == index) for index in range(2)]
    assert texts == [reference(30)[: reference(30).find(stop)]] * 2


def test_openai_client_streams_and_reads_usage(app: App) -> None:
    with OpenAI(base_url=app.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [app.config.name]
        chunks = list(
            client.chat.completions.create(
                model=app.config.name,
                messages=[{"role": "user", "content": PROMPT}],
                max_tokens=50,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == reference(50)
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 50


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 6])
def test_case_3_exactly_max_tokens(app: App, num_tokens: int) -> None:
    speculation = {"mode": "fixed", "chain": ["m8b", TARGET], "windows": [4]}
    answer = app.complete(max_tokens=num_tokens, speculation=speculation)
    assert answer["choices"][0]["text"] == reference(num_tokens)
    assert answer["usage"]["completion_tokens"] == num_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_case_2_a_stop_string_cuts_text_and_usage(app: App, stream: bool) -> None:
    text = reference(60)
    stop = text[20:24]
    fields = {"model": app.config.name, "prompt": PROMPT, "max_tokens": 60, "stop": [stop], "speculation": FIXED}
    if stream:
        with OpenAI(base_url=app.url + "/v1", api_key="none", max_retries=0) as client:
            extra = {"speculation": fields.pop("speculation")}
            chunks = list(client.completions.create(**fields, stream=True, extra_body=extra))  # type: ignore[call-overload]
        got, reason = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        answer = app.complete(**fields)
        got, reason = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
        assert answer["usage"]["completion_tokens"] == text.find(stop) + len(stop)
    assert (got, reason) == (text[: text.find(stop)], "stop")


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [1, 99999]}, 400, "prompt"),
        ({"prompt": {"text": "x"}}, 400, "prompt"),
        ({"prompt": "x" * 5000}, 400, "prompt"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": 4096}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"n": 0}, 400, "n"),
        ({"n": 17}, 400, "n"),
        ({"repetition_penalty": 0}, 400, "repetition_penalty"),
        ({"logprobs": 21}, 400, "logprobs"),
        ({"logprobs": 1, "echo": True}, 400, "echo"),
        ({"max_token": 3}, 400, "max_token"),
        ({"speculation": {"mode": "fixed", "chain": ["m9", "m70b"]}}, 400, "speculation.chain"),
        ({"speculation": {"modus": "off"}}, 400, "speculation.modus"),
    ],
)
def test_case_22_a_wrong_field_is_named(app: App, change: dict[str, Any], status: int, param: str) -> None:
    body = {"model": app.config.name, "prompt": PROMPT, "max_tokens": 1} | change
    response = app.http.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/v1/completions", b"{not json", 400),
        ("/v1/completions", b"[1]", 400),
        ("/v1/completions", b"x" * (10 << 20), 413),
        ("/v1/chat/completions", b'{"model":"emulated","messages":[]}', 400),
        ("/v1/nothing", b"{}", 404),
    ],
)
def test_case_22_a_wrong_body_is_refused_in_openais_shape(app: App, path: str, content: bytes, status: int) -> None:
    response = app.http.post(path, content=content)
    assert response.status_code == status, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert app.complete(max_tokens=1)["choices"][0]["text"] == reference(1)


def test_case_21_a_client_that_leaves_frees_kv_everywhere(app: App) -> None:
    names = [model.name for model in app.config.models]
    body = {"model": app.config.name, "prompt": PROMPT, "max_tokens": 2000, "stream": True}
    with app.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: when it is dropped, the client leaves
        next(lines)
        eventually(lambda: all(app.call(name, "num_sequences") == 1 for name in names), 20.0)
    eventually(lambda: all(app.call(name, "num_sequences") == 0 for name in names), 2.0)
    eventually(lambda: app.call("KVCoordinator", "sequences") == {}, 2.0)


def test_case_24_a_killed_drafter_changes_no_text(app: App) -> None:
    body = {"model": app.config.name, "prompt": PROMPT, "max_tokens": 150, "stream": True, "speculation": FIXED}
    assert _streamed_text(app, body, lambda: app.kill("m8b")) == reference(150)
    started_s = time.monotonic()
    assert app.complete(max_tokens=20)["choices"][0]["text"] == reference(20)
    assert time.monotonic() - started_s < 5.0, "later requests wait for the dead replica"
    losses = [line for line in app.http.get("/metrics").text.splitlines() if "specrelay_replica_losses" in line]
    assert any('model="m8b"' in line and float(line.split()[-1]) >= 1 for line in losses), losses
    eventually(lambda: "m8b" in app.call("KVCoordinator", "registered"), 20.0)


def test_a_killed_coordinator_changes_no_text_and_holders_converge(app: App) -> None:
    body = {"model": app.config.name, "prompt": PROMPT, "max_tokens": 900, "stream": True}
    body["speculation"] = {"mode": "auto"}
    converged: list[bool] = []

    def kill_and_watch() -> None:
        app.kill("KVCoordinator")
        # The calls wait for the restarted coordinator; the stream runs on meanwhile.
        eventually(lambda: _all_hold_as_much(app), 30.0)
        converged.append(True)

    assert _streamed_text(app, body, kill_and_watch) == reference(900)
    assert converged
    eventually(lambda: app.call("KVCoordinator", "sequences") == {}, 3.0)
    assert app.complete(max_tokens=20)["choices"][0]["text"] == reference(20)


@pytest.mark.parametrize(("victim", "cause"), [("Router", "router_lost"), (TARGET, "target_lost")])
def test_a_killed_router_or_target_changes_no_text(app: App, victim: str, cause: str) -> None:
    """Their restart takes seconds, in which the stream pauses: the request goes on with what is committed."""
    body = {"model": app.config.name, "prompt": PROMPT, "max_tokens": 120, "stream": True, "speculation": FIXED}
    assert _streamed_text(app, body, lambda: app.kill(victim)) == reference(120)
    assert f'specrelay_resumed_requests_total{{cause="{cause}"}} 1.0' in app.http.get("/metrics").text
    eventually(lambda: len(app.call("KVCoordinator", "registered")) == len(app.config.models), 30.0)
    assert app.complete(max_tokens=20)["choices"][0]["text"] == reference(20)


def test_metrics_have_every_family_of_the_contract(app: App) -> None:
    app.complete(max_tokens=40, speculation=FIXED)
    families = {family.name: family for family in text_string_to_metric_families(app.http.get("/metrics").text)}
    counters = "requests rounds draft_tokens accepted_tokens accepted_at_position committed_tokens rolled_back_tokens "
    counters += "stale_messages resent_prefixes replica_losses resumed_requests bad_frames plan_changes"
    histograms = "time_to_first_token_seconds inter_token_latency_seconds round_seconds step_seconds queue_seconds"
    gauges = "pair_divergence pair_acceptance kv_used_tokens kv_total_tokens open_sequences queued_requests chain_share"
    for kind, names in (("counter", counters), ("histogram", histograms), ("gauge", gauges)):
        assert {name: families["specrelay_" + name].type for name in names.split()} == dict.fromkeys(
            names.split(), kind
        )
    [first_tokens] = [s for s in families["specrelay_time_to_first_token_seconds"].samples if s.name.endswith("_count")]
    assert first_tokens.value >= 1
    eventually(lambda: _counter(app, "rolled_back_tokens", model=TARGET) > 0, 5.0)  # replicas report each second


def _counter(app: App, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(app.http.get("/metrics").text)
    samples = [s for f in families if f.name == "specrelay_" + name for s in f.samples if s.labels == labels]
    return sum(sample.value for sample in samples)


def _all_hold_as_much(app: App) -> bool:
    """Whether the one running sequence is known to the new coordinator, with all holders level."""
    try:
        sequences = app.call("KVCoordinator", "sequences")
    except Exception:
        return False
    return any(len(held) == len(app.config.models) and len(set(held.values())) == 1 for held in sequences.values())


def _streamed_text(app: App, body: dict[str, Any], at_fifth_event: Callable[[], None]) -> str:
    with OpenAI(base_url=app.url + "/v1", api_key="none", max_retries=0) as client:
        fields = dict(body)
        extra = {"speculation": fields.pop("speculation")}
        text = ""
        for index, chunk in enumerate(client.completions.create(**fields, extra_body=extra)):
            text += chunk.choices[0].text
            if index == 5:
                at_fifth_event()
    return text


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="policies of threads are Linux's")
def test_who_computes_or_routes_comes_first_and_ray_gives_way(app: App) -> None:
    def policies(deployment: str) -> set[int]:
        threads = Path("/proc", str(app.call(deployment, "pid")), "task").iterdir()
        return {os.sched_getscheduler(int(thread.name)) for thread in threads}

    assert policies("KVCoordinator") == {os.SCHED_BATCH}
    for deployment in ("Router", TARGET):  # Ray's own threads in these processes, and ours
        assert policies(deployment) == {os.SCHED_BATCH, os.SCHED_OTHER}


def test_router_table_shows_every_replica(app: App) -> None:
    table = app.http.get("/router/table").json()
    assert [model["name"] for model in table["models"]] == [model.name for model in app.config.models]
    assert all(any(replica["up"] for replica in model["replicas"]) for model in table["models"])
