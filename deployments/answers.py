"""Answers in OpenAI's shapes: whole, or as server-sent events, one per commit."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from deployments.completions import Piece
from deployments.openai_api import ApiError, Generation
from kvstate.protocol import FinishReason, OpenRequest, SpecMetrics


def spec_metrics(metrics: SpecMetrics) -> dict[str, object]:
    """`metrics.speculative_decoding` of an answer."""
    rate = metrics.accepted_draft_tokens / metrics.draft_tokens if metrics.draft_tokens else 0.0
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + metrics.accepted_draft_tokens / max(1, metrics.rounds),
            "draft_acceptance_rate": rate,
            "num_spec_steps": metrics.rounds,
            "num_spec_tokens": metrics.most_draft_tokens,
            "num_draft_tokens": metrics.draft_tokens,
            "num_accepted_draft_tokens": metrics.accepted_draft_tokens,
            "acceptance_histogram": list(metrics.histogram),
            "chain": list(metrics.chain),
            "rounds": metrics.rounds,
        }
    }


@dataclass(frozen=True, slots=True)
class Shape:
    """How one answer is written: chat or plain completion, whole or in chunks."""

    id: str
    created: int
    model: str
    is_chat: bool

    @classmethod
    def new(cls, model: str, is_chat: bool) -> "Shape":
        prefix = "chatcmpl-" if is_chat else "cmpl-"
        return cls(prefix + secrets.token_hex(12), int(time.time()), model, is_chat)

    def chunk(self, text: str, reason: FinishReason | None, first: bool) -> dict[str, object]:
        choice: dict[str, object] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if self.is_chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
        else:
            choice["text"] = text
        return self._head("chat.completion.chunk" if self.is_chat else "text_completion") | {"choices": [choice]}

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, object]:
        head = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        return head | {"choices": [], "usage": usage}

    def whole(self, text: str, reason: FinishReason | None, usage: dict[str, int]) -> dict[str, object]:
        choice: dict[str, object] = {"index": 0, "finish_reason": reason, "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return self._head("chat.completion" if self.is_chat else "text_completion") | {
            "choices": [choice],
            "usage": usage,
        }

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage_of(message: OpenRequest, output_len: int) -> dict[str, int]:
    prompt = len(message.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": output_len, "total_tokens": prompt + output_len}


async def whole_answer(
    parts: AsyncGenerator[Piece, None], shape: Shape, body: Generation, message: OpenRequest
) -> dict[str, object]:
    text, last = "", Piece("", 0)
    async with aclosing(parts):
        async for piece in parts:
            text, last = text + piece.text, piece
    answer = shape.whole(text, last.finish_reason, usage_of(message, last.output_len))
    if body.include_spec_metrics and last.metrics is not None:
        answer["metrics"] = spec_metrics(last.metrics)
    return answer


async def events(
    first: Piece, parts: AsyncGenerator[Piece, None], shape: Shape, body: Generation, message: OpenRequest
) -> AsyncIterator[str]:
    """One event per commit; an error after the first token is an event too."""
    piece = first
    async with aclosing(parts):
        yield _event(_chunk(first, shape, body, is_first=True))
        try:
            async for piece in parts:
                yield _event(_chunk(piece, shape, body, is_first=False))
        except ApiError as error:
            yield _event(error.body())
            return
    if body.stream_options is not None and body.stream_options.include_usage:
        yield _event(shape.usage_chunk(usage_of(message, piece.output_len)))
    yield "data: [DONE]\n\n"


def _chunk(piece: Piece, shape: Shape, body: Generation, is_first: bool) -> dict[str, object]:
    chunk = shape.chunk(piece.text, piece.finish_reason, is_first)
    if body.include_spec_metrics and piece.metrics is not None:
        chunk["metrics"] = spec_metrics(piece.metrics)
    return chunk


def _event(data: Mapping[str, object]) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
