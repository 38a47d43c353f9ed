import json
from collections.abc import Iterator

from specrelay.chat import Conversation, converse, served_model
from specrelay.endpoint import Endpoint
from tests.specrelay.fake_app import Answer, FakeApp


class Typed:
    """A terminal that types what it was given and keeps what it was shown."""

    def __init__(self, *texts: str) -> None:
        self._texts: Iterator[str] = iter(texts)
        self.shown = ""

    def ask(self) -> str | None:
        return next(self._texts, None)

    def show(self, text: str) -> None:
        self.shown += text


def deltas(*pieces: str) -> Answer:
    events = [json.dumps({"choices": [{"delta": {"content": piece}}]}) for piece in pieces]
    return Answer(events=(json.dumps({"choices": [{"delta": {"role": "assistant"}}]}), *events, "[DONE]"))


def roles(app: FakeApp, request: int) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in app.received[request]["messages"]]


def test_answers_stream_and_the_history_is_sent_again(app: FakeApp) -> None:
    app.routes["/v1/chat/completions"] = lambda body: deltas("Good ", "day 😀")
    screen = Typed("hello", "  ", "again", "/new", "fresh", "/exit", "never sent")
    converse(app.endpoint, Conversation("m", system="be brief", fields={"temperature": 0.5}), screen)
    assert screen.shown == "Good day 😀\n" * 3
    assert roles(app, 1) == [
        ("system", "be brief"),
        ("user", "hello"),
        ("assistant", "Good day 😀"),
        ("user", "again"),
    ]
    assert roles(app, 2) == [("system", "be brief"), ("user", "fresh")]
    assert [body["temperature"] for body in app.received] == [0.5] * 3


def test_an_error_is_shown_and_its_question_forgotten(app: FakeApp) -> None:
    broken = Answer(events=(json.dumps({"error": {"message": "no target"}}),))
    answers = iter([Answer({"error": {"message": "too long"}}, status=400), broken, deltas("yes")])
    app.routes["/v1/chat/completions"] = lambda body: next(answers)
    screen = Typed("one", "two", "three")
    converse(app.endpoint, Conversation("m"), screen)
    assert "too long" in screen.shown
    assert "no target" in screen.shown
    assert screen.shown.endswith("yes\n")
    assert roles(app, 2) == [("user", "three")]


def test_model_and_key_come_from_the_app_and_the_environment(app: FakeApp) -> None:
    app.routes["/v1/models"] = lambda body: Answer({"data": [{"id": "laptop"}]})
    assert served_model(Endpoint(app.endpoint.url, {"Authorization": "Bearer k"})) == "laptop"
    assert app.received[0]["_authorization"] == "Bearer k"
