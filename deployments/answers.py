"""Answers in OpenAI's shapes: whole, or as server-sent events, one per commit."""

import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from deployments.choices import ChoicePieces
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

    def chunk(self, index: int, text: str, reason: FinishReason | None, first: bool) -> dict[str, object]:
        choice: dict[str, object] = {"index": index, "finish_reason": reason, "logprobs": None}
        if self.is_chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
        else:
            choice["text"] = text
        return self._head("chat.completion.chunk" if self.is_chat else "text_completion") | {"choices": [choice]}

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, object]:
        head = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        return head | {"choices": [], "usage": usage}

    def whole(self, choices: Sequence[tuple[str, FinishReason | None]], usage: dict[str, int]) -> dict[str, object]:
        """`choices`: text and reason of each."""
        shaped = [self._choice(index, *choice) for index, choice in enumerate(choices)]
        head = self._head("chat.completion" if self.is_chat else "text_completion")
        return head | {"choices": shaped, "usage": usage}

    def _choice(self, index: int, text: str, reason: FinishReason | None) -> dict[str, object]:
        choice: dict[str, object] = {"index": index, "finish_reason": reason, "logprobs": None}
        return choice | ({"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text})

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage_of(message: OpenRequest, output_len: int) -> dict[str, int]:
    prompt = len(message.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": output_len, "total_tokens": prompt + output_len}


async def whole_answer(parts: ChoicePieces, shape: Shape, body: Generation, message: OpenRequest) -> dict[str, object]:
    texts, lasts = [""] * body.n, [Piece("", 0)] * body.n
    async with aclosing(parts):
        async for index, piece in parts:
            texts[index] += piece.text
            lasts[index] = piece
    reasons = [last.finish_reason for last in lasts]
    usage = usage_of(message, sum(last.output_len for last in lasts))
    answer = shape.whole(list(zip(texts, reasons, strict=True)), usage)
    counted = [last.metrics for last in lasts if last.metrics is not None]
    if body.include_spec_metrics and counted:
        answer["metrics"] = spec_metrics(summed(counted))
    return answer


async def events(
    first: tuple[int, Piece], parts: ChoicePieces, shape: Shape, body: Generation, message: OpenRequest
) -> AsyncIterator[str]:
    """One event per commit; an error after the first token is an event too."""
    output_lens: dict[int, int] = {}

    def event(index: int, piece: Piece) -> str:
        is_first, output_lens[index] = index not in output_lens, piece.output_len
        return _event(_chunk(index, piece, shape, body, is_first))

    async with aclosing(parts):
        yield event(*first)
        try:
            async for index, piece in parts:
                yield event(index, piece)
        except ApiError as error:
            yield _event(error.body())
            return
    if body.stream_options is not None and body.stream_options.include_usage:
        yield _event(shape.usage_chunk(usage_of(message, sum(output_lens.values()))))
    yield "data: [DONE]\n\n"


def summed(counts: Sequence[SpecMetrics]) -> SpecMetrics:
    """Of all choices; `chain` is the first one's."""
    histograms = itertools.zip_longest(*(c.histogram for c in counts), fillvalue=0)
    return SpecMetrics(
        rounds=sum(c.rounds for c in counts),
        draft_tokens=sum(c.draft_tokens for c in counts),
        accepted_draft_tokens=sum(c.accepted_draft_tokens for c in counts),
        histogram=tuple(map(sum, histograms)),
        most_draft_tokens=max(c.most_draft_tokens for c in counts),
        chain=counts[0].chain,
    )


def _chunk(index: int, piece: Piece, shape: Shape, body: Generation, is_first: bool) -> dict[str, object]:
    chunk = shape.chunk(index, piece.text, piece.finish_reason, is_first)
    if body.include_spec_metrics and piece.metrics is not None:
        chunk["metrics"] = spec_metrics(piece.metrics)
    return chunk


def _event(data: Mapping[str, object]) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
