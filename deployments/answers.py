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
from deployments.logprobs import Entry, LogprobWriter
from deployments.openai_api import ApiError, Generation
from kvstate.protocol import FinishReason, OpenRequest, SpecMetrics
from models.tokenizer import Tokenizer
from router.plan import stated


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
            "chain": [stated(element) for element in metrics.chain],
            "rounds": metrics.rounds,
        }
    }


@dataclass(frozen=True, slots=True)
class Shape:
    """How one answer is written: chat or plain completion, whole or in chunks. `echo` stands before each text."""

    id: str
    created: int
    model: str
    is_chat: bool
    echo: str = ""

    @classmethod
    def new(cls, model: str, is_chat: bool, echo: str = "") -> "Shape":
        prefix = "chatcmpl-" if is_chat else "cmpl-"
        return cls(prefix + secrets.token_hex(12), int(time.time()), model, is_chat, echo)

    def chunk(
        self, index: int, text: str, reason: FinishReason | None, first: bool, logprobs: dict[str, object] | None
    ) -> dict[str, object]:
        choice: dict[str, object] = {"index": index, "finish_reason": reason, "logprobs": logprobs}
        if self.is_chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
        else:
            choice["text"] = self.echo + text if first else text
        return self._head("chat.completion.chunk" if self.is_chat else "text_completion") | {"choices": [choice]}

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, object]:
        head = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        return head | {"choices": [], "usage": usage}

    def whole(
        self,
        choices: Sequence[tuple[str, FinishReason | None, dict[str, object] | None]],
        usage: dict[str, int],
    ) -> dict[str, object]:
        """`choices`: text, reason and log-probabilities of each."""
        shaped = [self._choice(index, *choice) for index, choice in enumerate(choices)]
        head = self._head("chat.completion" if self.is_chat else "text_completion")
        return head | {"choices": shaped, "usage": usage}

    def _choice(
        self, index: int, text: str, reason: FinishReason | None, logprobs: dict[str, object] | None
    ) -> dict[str, object]:
        choice: dict[str, object] = {"index": index, "finish_reason": reason, "logprobs": logprobs}
        shown = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": self.echo + text}
        return choice | shown

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage_of(message: OpenRequest, output_len: int) -> dict[str, int]:
    prompt = len(message.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": output_len, "total_tokens": prompt + output_len}


class Writer:
    """Writes one answer to `body`, whose choices come in pieces."""

    def __init__(self, shape: Shape, body: Generation, message: OpenRequest, tokenizer: Tokenizer) -> None:
        self._shape, self._body, self._message = shape, body, message
        self._logprobs = [LogprobWriter(tokenizer, shape.is_chat) for _ in range(body.n)]
        self._output_lens: dict[int, int] = {}

    async def whole(self, parts: ChoicePieces) -> dict[str, object]:
        texts, lasts = [""] * self._body.n, [Piece("", 0)] * self._body.n
        entries: list[list[Entry]] = [[] for _ in texts]
        async with aclosing(parts):
            async for index, piece in parts:
                texts[index] += piece.text
                entries[index].extend(piece.logprobs)
                lasts[index] = piece
        reasons = [last.finish_reason for last in lasts]
        logprobs = [self._written(index, found) for index, found in enumerate(entries)]
        usage = usage_of(self._message, sum(last.output_len for last in lasts))
        answer = self._shape.whole(list(zip(texts, reasons, logprobs, strict=True)), usage)
        counted = [last.metrics for last in lasts if last.metrics is not None]
        if self._body.include_spec_metrics and counted:
            answer["metrics"] = spec_metrics(summed(counted))
        return answer

    async def events(self, first: tuple[int, Piece], parts: ChoicePieces) -> AsyncIterator[str]:
        """One event per commit; an error after the first token is an event too."""
        async with aclosing(parts):
            yield self._chunk(*first)
            try:
                async for index, piece in parts:
                    yield self._chunk(index, piece)
            except ApiError as error:
                yield _event(error.body())
                return
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield _event(self._shape.usage_chunk(usage_of(self._message, sum(self._output_lens.values()))))
        yield "data: [DONE]\n\n"

    def _chunk(self, index: int, piece: Piece) -> str:
        is_first, self._output_lens[index] = index not in self._output_lens, piece.output_len
        logprobs = self._written(index, piece.logprobs)
        chunk = self._shape.chunk(index, piece.text, piece.finish_reason, is_first, logprobs)
        if self._body.include_spec_metrics and piece.metrics is not None:
            chunk["metrics"] = spec_metrics(piece.metrics)
        return _event(chunk)

    def _written(self, index: int, entries: Sequence[Entry]) -> dict[str, object] | None:
        return self._logprobs[index].write(entries) if self._body.num_logprobs >= 0 else None


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


def _event(data: Mapping[str, object]) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
