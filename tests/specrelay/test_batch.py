import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from specrelay.batch import Limits, run_batch, write_in_order
from specrelay.batch_rows import Row, check_output, read_rows, written_whole
from specrelay.exits import Refused
from tests.specrelay.fake_app import Answer, FakeApp


def rows(count: int) -> list[Row]:
    return [Row(index, f"r{index}", "/v1/completions", {"prompt": str(index)}) for index in range(count)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def test_results_keep_the_order_of_the_input_whatever_finishes_first(app: FakeApp, tmp_path: Path) -> None:
    """Row 0 is answered only after all others were: the file still begins with it."""
    others = threading.Semaphore(0)

    def complete(body: dict[str, Any]) -> Answer:
        if body["prompt"] == "0":
            for _ in range(11):
                assert others.acquire(timeout=10)
        else:
            others.release()
        return Answer({"text": body["prompt"]})

    app.routes["/v1/completions"] = complete
    output, finished = tmp_path / "out.jsonl", []
    errors = await run_batch(app.endpoint, rows(12), output, Limits(concurrency=3), lambda: finished.append(1))
    assert errors == 0
    assert len(finished) == 12
    assert [line["index"] for line in lines(output)] == list(range(12))
    assert [line["id"] for line in lines(output)] == [f"r{index}" for index in range(12)]
    assert [line["response"]["text"] for line in lines(output)] == [str(index) for index in range(12)]
    assert 1 < app.most_at_once <= 3


async def test_a_refused_row_becomes_an_error_line_and_the_others_go_on(app: FakeApp, tmp_path: Path) -> None:
    refusal = {"message": "too long", "type": "invalid_request_error", "param": "prompt", "code": 400}
    app.routes["/v1/completions"] = lambda body: (
        Answer({"error": refusal}, status=400) if body["prompt"] == "1" else Answer({"text": "ok"})
    )
    errors = await run_batch(app.endpoint, rows(3), tmp_path / "out.jsonl", Limits(), lambda: None)
    assert errors == 1
    assert [("response" in line, line.get("error")) for line in lines(tmp_path / "out.jsonl")] == [
        (True, None),
        (False, refusal),
        (True, None),
    ]


async def test_a_busy_app_is_asked_again_after_the_time_it_names(app: FakeApp, tmp_path: Path) -> None:
    answers = iter(
        [Answer({}, status=503, headers={"Retry-After": "0.05"}), Answer({}, status=429, headers={"Retry-After": "0"})]
    )
    app.routes["/v1/completions"] = lambda body: next(answers, Answer({"text": "ok"}))
    assert await run_batch(app.endpoint, rows(1), tmp_path / "out.jsonl", Limits(), lambda: None) == 0
    assert len(app.received) == 3


async def test_an_app_that_stays_busy_ends_at_the_deadline(app: FakeApp, tmp_path: Path) -> None:
    app.routes["/v1/completions"] = lambda body: Answer({}, status=503, headers={"Retry-After": "0.1"})
    assert await run_batch(app.endpoint, rows(2), tmp_path / "o.jsonl", Limits(deadline_s=0.4), lambda: None) == 2
    assert [line["error"]["code"] for line in lines(tmp_path / "o.jsonl")] == [408, 408]


async def test_a_broken_row_leaves_neither_output_nor_partial_file(tmp_path: Path) -> None:
    async def send(row: Row) -> dict[str, Any]:
        raise ValueError(row.index)

    with pytest.raises(ExceptionGroup), written_whole(tmp_path / "out.jsonl") as file:
        await write_in_order(rows(3), send, file, concurrency=2)
    assert list(tmp_path.iterdir()) == []


async def test_lines_are_written_as_soon_as_all_before_them_are() -> None:
    file, seen = io.StringIO(), []

    async def send(row: Row) -> dict[str, Any]:
        seen.append(len(file.getvalue().splitlines()))
        return {"index": row.index}

    await write_in_order(rows(4), send, file, concurrency=1)
    assert seen == [0, 1, 2, 3]


def test_an_older_output_survives_a_failed_run(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("old", encoding="utf-8")
    with pytest.raises(KeyboardInterrupt), written_whole(output) as file:
        file.write("half")
        raise KeyboardInterrupt
    assert output.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("[1]", "not an object"),
        ('{"max_tokens": 3}', "needs one of prompt and messages, it has neither"),
        ('{"prompt": "a", "messages": []}', "it has prompt and messages"),
        ('{"prompt": "a", "stream": true}', "stream is not possible"),
        ('{"prompt": "a", "id": true}', "id must be"),
        ('{"prompt": "a", "id": "x"}', "make ids unique"),
    ],
)
def test_a_bad_line_is_refused_with_its_place(tmp_path: Path, line: str, why: str) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"id": "x", "prompt": "first"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(Refused, match=why) as refusal:
        read_rows(source, "m")
    assert f"{source}" in refusal.value.message
    assert "id" in why or f"{source}:3" in refusal.value.message


def test_rows_count_from_zero_and_get_the_model_where_they_name_none(tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text(
        '{"prompt": "a\u2028b", "max_tokens": 3}\n\n{"id": 7, "messages": [], "model": "other"}', encoding="utf-8"
    )
    assert read_rows(source, "m") == [
        Row(0, None, "/v1/completions", {"model": "m", "prompt": "a\u2028b", "max_tokens": 3}),
        Row(1, 7, "/v1/chat/completions", {"model": "other", "messages": []}),
    ]


def test_empty_and_missing_input_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n", encoding="utf-8")
    for name in ("empty", "missing"):
        with pytest.raises(Refused, match=name):
            read_rows(tmp_path / name, "m")


def test_output_must_be_writable_and_absolute_inside_a_ray_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    check_output(Path("out.jsonl"))
    with pytest.raises(Refused, match="does not exist: create it"):
        check_output(tmp_path / "none" / "out.jsonl")
    with pytest.raises(Refused, match="is a folder"):
        check_output(tmp_path)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    check_output(tmp_path / "out.jsonl")
    with pytest.raises(Refused, match="absolute path"):
        check_output(Path("out.jsonl"))
