"""OpenAI's request bodies as far as they are served, and its error shape.

A field of OpenAI's API that is not served yet is refused by name, never ignored; so is an unknown one.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.config import AppConfig
from cluster.config_rules import chain_fault
from router.plan import GROUP, members_of, split_cascade

NOT_SERVED = frozenset(
    {
        "audio",
        "best_of",
        "function_call",
        "functions",
        "grammar",
        "guided_json",
        "metadata",
        "modalities",
        "parallel_tool_calls",
        "prediction",
        "reasoning_effort",
        "response_format",
        "service_tier",
        "store",
        "suffix",
        "tool_choice",
        "tools",
        "verbosity",
        "web_search_options",
    }
)
NEUTRAL: dict[str, object] = {
    "best_of": 1,
    "logprobs": False,
    "response_format": {"type": "text"},
    "tools": [],
}
"""Values with which a field that is not served asks for nothing: clients send them as their defaults."""
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

MOST_WINDOW = 1024
MOST_STOPS = 64
MOST_CHOICES = 16
MOST_LOGPROBS = 20
MOST_ID = 2**31 - 1

B = TypeVar("B", bound="Generation")


class ApiError(Exception):
    """An answer in OpenAI's error shape."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(status, message, param, retry_after_s)
        self.status, self.message, self.param, self.retry_after_s = status, message, param, retry_after_s

    def body(self) -> dict[str, object]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


TokenText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
"""A token id as JSON's keys write it."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Body):
    include_usage: bool = False


ModelName = Annotated[str, Field(max_length=1024)]


class SpeculationBody(Body):
    mode: Literal["auto", "off", "fixed"] = "auto"
    chain: list[ModelName | Annotated[list[ModelName], Field(min_length=1)]] = []
    windows: Annotated[list[Annotated[int, Field(ge=1, le=MOST_WINDOW)]], Field(max_length=64)] = []

    @property
    def elements(self) -> tuple[str, ...]:
        """The chain, the names of drafters that cooperate joined by GROUP."""
        return tuple(element if isinstance(element, str) else GROUP.join(element) for element in self.chain)


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """Content given in text parts is joined to one string."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    def for_template(self) -> dict[str, str]:
        return {"role": self.role, "content": self.text} | ({} if self.name is None else {"name": self.name})


class Generation(Body):
    """What chat and plain completions share."""

    model: str
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    seed: int | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    logit_bias: Annotated[dict[TokenText, Annotated[float, Field(ge=-100.0, le=100.0)]], Field(max_length=1024)] = {}
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=MOST_ID)]], Field(max_length=MOST_STOPS)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    speculation: SpeculationBody = SpeculationBody()
    include_spec_metrics: bool = False

    @property
    def stops(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in given if text]

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int:
        """How many likeliest tokens are stated beside each output token's log-probability; −1: none at all."""
        return -1


class ChatBody(Generation):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1


class CompletionBody(Generation):
    prompt: str | list[Annotated[int, Field(ge=0)]]
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool = False

    @property
    def wanted_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs


def parse_body(raw: bytes, kind: type[B], config: AppConfig) -> B:
    """Raises ApiError naming the field."""
    if len(raw) > config.http.max_body_bytes:
        raise ApiError(413, f"the body has more than {config.http.max_body_bytes} bytes (http.max_body_bytes)")
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object")
    present = {key: value for key, value in data.items() if value is not None and not _is_neutral(key, value)}
    for name in sorted(NOT_SERVED.intersection(present)):
        raise ApiError(400, f"{name} is not supported yet", name)
    body = _validated(kind, present)
    if body.model != config.served_model_id:
        raise ApiError(
            404, f"the model {body.model!r} does not exist; this server has {config.served_model_id!r}", "model"
        )
    _check_speculation(body.speculation, config)
    _check_combinations(body)
    return body


def _is_neutral(name: str, value: object) -> bool:
    """An integer 1 is no True: OpenAI's completions take a number for `logprobs`."""
    if name not in NEUTRAL:
        return False
    neutral = NEUTRAL[name]
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _validated(kind: type[B], data: dict[str, Any]) -> B:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = max(error.errors(), key=lambda e: len(e["loc"]))  # of a union's errors, of the member that fits most
        param = _place(first["loc"], data, first["type"])
        if first["type"] == "extra_forbidden":
            raise ApiError(400, f"unknown field {param}", param) from None
        raise ApiError(400, f"{param}: {first['msg']}", param) from None


def _place(location: Sequence[int | str], data: Any, kind: str) -> str:
    """Where in the body the error is, without the names of union members that pydantic adds."""
    place: list[str] = []
    for part in location:
        if _has(data, part):
            data = data[part]
        elif kind != "missing" or part != location[-1]:
            continue
        place.append(str(part))
    return ".".join(place)


def _check_combinations(body: Generation) -> None:
    if isinstance(body, ChatBody) and body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        raise ApiError(400, "echo with logprobs is not supported: the prompt's are not computed", "echo")


def _check_speculation(wish: SpeculationBody, config: AppConfig) -> None:
    levels = config.levels
    if wish.mode != "fixed":
        if wish.chain or wish.windows:
            raise ApiError(400, "speculation.chain and windows need mode fixed", "speculation.mode")
        return
    tail, elements = None, wish.elements
    if elements:
        first, tail = split_cascade(elements[0])
        elements = (*([tail] if tail else []), first, *elements[1:])
    named = [members_of(element) for element in elements]
    fault = chain_fault(named, levels, config.target.name, group_at=int(tail is not None))
    if fault is not None or (tail and len(wish.chain) == 1):
        reason = "a tail follows a drafter, which the target follows" if fault is None else fault[1]
        raise ApiError(400, f"speculation.chain: {reason} (models: {', '.join(levels)})", "speculation.chain")
    if wish.windows and len(wish.windows) != len(wish.chain) - 1:
        raise ApiError(
            400, "speculation.windows must have one window less than chain has models", "speculation.windows"
        )


def _has(data: object, part: int | str) -> bool:
    if isinstance(data, list):
        return isinstance(part, int) and part < len(data)
    return isinstance(data, dict) and part in data
