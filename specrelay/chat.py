"""`chat`: a conversation in the terminal over the app's own HTTP interface, streamed, with its history."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
from rich.console import Console

from specrelay.endpoint import CONNECT_TIMEOUT_S, Endpoint, error_message, get_json
from specrelay.exits import Failed

READ_TIMEOUT_S = 330.0
"""A little longer than the usual deadline of a request, so that the app's own error comes first."""

Message = dict[str, str]


class Screen(Protocol):
    """What a chat needs of a terminal: `ask` returns None at the end of the input."""

    def ask(self) -> str | None: ...

    def show(self, text: str) -> None: ...


class Terminal:
    """The real screen: prompts with a marker and writes pieces as they come."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def ask(self) -> str | None:
        try:
            return self._console.input("[bold green]› [/bold green]")
        except (EOFError, KeyboardInterrupt):
            return None

    def show(self, text: str) -> None:
        self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)


@dataclass(slots=True)
class Conversation:
    """The messages so far; the request they make."""

    model: str
    system: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def request(self) -> dict[str, Any]:
        return {"model": self.model, "messages": self.messages, "stream": True, **self.fields}


def served_model(endpoint: Endpoint) -> str:
    models = get_json(endpoint, "/v1/models").get("data") or []
    if not models:
        raise Failed(f"the app at {endpoint.url} serves no model")
    return str(models[0]["id"])


def converse(endpoint: Endpoint, conversation: Conversation, screen: Screen) -> None:
    """Ask, stream the answer, remember both; until the input ends or `/exit`. `/new` forgets the history."""
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    with httpx.Client(base_url=endpoint.url, headers=endpoint.headers, timeout=timeout) as client:
        while (text := screen.ask()) is not None and text.strip() != "/exit":
            if text.strip() == "/new":
                conversation.reset()
            elif text.strip():
                _exchange(client, conversation, text, screen)


def _exchange(client: httpx.Client, conversation: Conversation, text: str, screen: Screen) -> None:
    """One question and its answer. An error is shown and the question forgotten: the conversation goes on."""
    conversation.messages.append({"role": "user", "content": text})
    answer = ""
    try:
        for piece in stream_answer(client, conversation.request()):
            answer += piece
            screen.show(piece)
    except (Failed, httpx.TransportError) as error:
        conversation.messages.pop()
        screen.show(f"\n{error}\n")
        return
    except KeyboardInterrupt:
        screen.show(" (stopped)")
    screen.show("\n")
    conversation.messages.append({"role": "assistant", "content": answer})


def stream_answer(client: httpx.Client, request: dict[str, Any]) -> Iterator[str]:
    """The text deltas of one streamed chat completion; Failed on an error, before the stream or inside it."""
    with client.stream("POST", "/v1/chat/completions", json=request) as response:
        if response.status_code != httpx.codes.OK:
            response.read()
            raise Failed(error_message(response))
        for line in response.iter_lines():
            if line.startswith("data:") and (data := line.removeprefix("data:").strip()) != "[DONE]":
                yield _delta(json.loads(data))


def _delta(event: dict[str, Any]) -> str:
    if "error" in event:
        raise Failed(str(event["error"].get("message")))
    choices = event.get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")
