"""From OpenAI's bodies to the router's messages, and from committed tokens to text cut at stop strings."""

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass

from cluster.config import AppConfig
from deployments.openai_api import ApiError, ChatBody, CompletionBody, Generation
from deployments.router_link import RouterLink
from kvstate.protocol import Delivered, FinishReason, OpenRequest, Sampling, SpecMetrics, Speculation
from models.tokenizer import IncrementalDetokenizer, Tokenizer, TokenizerError


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that a commit completed, and how many output tokens there are in all. The last has the reason."""

    text: str
    output_len: int
    finish_reason: FinishReason | None = None
    metrics: SpecMetrics | None = None


@dataclass(frozen=True, slots=True)
class Translator:
    """Requests of one app."""

    config: AppConfig
    tokenizer: Tokenizer
    context_len: int
    vocabulary_len: int

    def open_request(self, body: ChatBody | CompletionBody) -> OpenRequest:
        """Raises ApiError for a prompt that is empty or too long."""
        prompt, param = self._prompt(body)
        http = self.config.http
        if not prompt:
            raise ApiError(400, f"{param} is empty", param)
        if max(prompt) >= self.vocabulary_len:
            raise ApiError(400, f"{param}: token ids end at {self.vocabulary_len - 1}", param)
        if http.max_prompt_tokens is not None and len(prompt) > http.max_prompt_tokens:
            raise ApiError(400, f"the prompt has {len(prompt)} tokens, more than {http.max_prompt_tokens}", param)
        rest = self.context_len - len(prompt)
        wanted = body.wanted_tokens
        if rest < 1 or (wanted is not None and wanted > rest):
            asked = "" if wanted is None else f" and max_tokens asks for {wanted}"
            fault = "max_tokens" if wanted is not None and rest >= 1 else param
            raise ApiError(400, f"the prompt has {len(prompt)} tokens{asked}: the context is {self.context_len}", fault)
        sampling = Sampling(
            1.0 if body.temperature is None else body.temperature,
            body.top_k or 0,
            1.0 if body.top_p is None else body.top_p,
            secrets.randbits(63) if body.seed is None else body.seed % 2**63,
        )
        wish = body.speculation
        speculation = Speculation(wish.mode, tuple(wish.chain), tuple(wish.windows))
        stops = tuple(sorted(self.tokenizer.stop_ids))
        return OpenRequest("", tuple(prompt), sampling, wanted or rest, stops, http.deadline_s, (), speculation)

    def _prompt(self, body: Generation) -> tuple[list[int], str]:
        try:
            if isinstance(body, ChatBody):
                return self.tokenizer.render_chat([m.model_dump(exclude_none=True) for m in body.messages]), "messages"
            assert isinstance(body, CompletionBody)
            return self.tokenizer.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt, "prompt"
        except TokenizerError as error:
            raise ApiError(400, str(error), "messages" if isinstance(body, ChatBody) else "prompt") from error


async def pieces(
    link: RouterLink, message: OpenRequest, tokenizer: Tokenizer, stops: list[str]
) -> AsyncIterator[Piece]:
    """Text as it is committed, cut before a stop string, wherever it begins and ends."""
    text, shown, output_len = "", 0, 0
    detokenizer = IncrementalDetokenizer(tokenizer)
    cut_len: int | None = None
    stream = link.generate(message)
    async for part in stream:
        if cut_len is not None:
            if part.finish_reason is not None:
                yield Piece("", cut_len, FinishReason.STOP, part.metrics)
            continue
        for token in part.tokens:
            output_len += 1
            text += detokenizer.push([token])
            found = _first_stop(text, stops)
            if found is not None:
                cut_len, text = output_len, text[:found]
                break
        if cut_len is None and part.finish_reason is not None:
            text += detokenizer.flush()
        ends = cut_len is not None or part.finish_reason is not None
        safe = len(text) if ends else len(text) - _held_back(text, stops)
        fresh, shown = text[shown:safe], max(shown, safe)
        if cut_len is not None:
            yield _cut_piece(link, message, fresh, cut_len, part)
        else:
            yield Piece(fresh, output_len, part.finish_reason, part.metrics)
        if part.finish_reason is not None:
            return


def _cut_piece(link: RouterLink, message: OpenRequest, text: str, cut_len: int, part: Delivered) -> Piece:
    """The last text. The request ended anyway, or ends now and its counts follow."""
    if part.finish_reason is not None:
        return Piece(text, cut_len, FinishReason.STOP, part.metrics)
    link.cut(message, cut_len)
    return Piece(text, cut_len)


def _first_stop(text: str, stops: list[str]) -> int | None:
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def _held_back(text: str, stops: list[str]) -> int:
    """Characters at the end that may be the beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((n for n in sizes if any(stop.startswith(text[-n:]) for stop in stops)), 0)
