"""From OpenAI's bodies to the router's messages, and from committed tokens to text cut at stop strings."""

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from cluster.config import AppConfig
from deployments.logprobs import Entry
from deployments.openai_api import ApiError, ChatBody, CompletionBody, Generation
from deployments.router_link import RouterLink
from kvstate.protocol import FinishReason, OpenRequest, Sampling, SpecMetrics, Speculation
from models.tokenizer import IncrementalDetokenizer, Tokenizer, TokenizerError
from router.classes import MOST_CHARACTERS, classify

WHOLE_GATHER_S = 0.25
"""How long tokens of an answer that is sent whole may wait for others, where no stop string can end it among them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that a commit completed, and how many output tokens there are in all. The last has the reason.

    `logprobs`: of the newly counted tokens, where they were asked for.
    """

    text: str
    output_len: int
    finish_reason: FinishReason | None = None
    metrics: SpecMetrics | None = None
    logprobs: tuple[Entry, ...] = ()


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
        if body.min_tokens > (wanted or rest):
            raise ApiError(
                400, f"min_tokens {body.min_tokens} is more than the {wanted or rest} tokens asked for", "min_tokens"
            )
        self._check_ids(body)
        wish = body.speculation
        speculation = Speculation(wish.mode, wish.elements, tuple(wish.windows))
        stops = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else self.tokenizer.stop_ids)
        sampling, stop_ids = self._sampling(body, stops), tuple(sorted(stops))
        limits = (wanted or rest, stop_ids, http.deadline_s)
        request_class, gather_s = classify(self._asked(body)), 0.0 if body.stream or body.stops else WHOLE_GATHER_S
        return OpenRequest(
            "", tuple(prompt), sampling, *limits, (), speculation, body.num_logprobs, request_class, gather_s
        )

    def echo(self, body: Generation) -> str:
        """What an answer repeats of its prompt."""
        if not isinstance(body, CompletionBody) or not body.echo:
            return ""
        return body.prompt if isinstance(body.prompt, str) else self.tokenizer.decode(body.prompt)

    def _asked(self, body: Generation) -> str:
        """The text that says most about the answer."""
        if isinstance(body, ChatBody):
            return body.messages[-1].text
        assert isinstance(body, CompletionBody)
        return body.prompt if isinstance(body.prompt, str) else self.tokenizer.decode(body.prompt[-MOST_CHARACTERS:])

    def _sampling(self, body: Generation, stops: frozenset[int]) -> Sampling:
        return Sampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=body.top_k or 0,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=secrets.randbits(63) if body.seed is None else body.seed % 2**64,
            min_p=body.min_p,
            logit_bias=tuple(sorted((int(token), value) for token, value in body.logit_bias.items())),
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            banned_ids=tuple(sorted(self.tokenizer.stop_ids)) if body.ignore_eos else (),
            end_ids=tuple(sorted(stops)) if body.min_tokens else (),
            min_tokens=body.min_tokens,
        )

    def _check_ids(self, body: Generation) -> None:
        for param, ids in (("logit_bias", map(int, body.logit_bias)), ("stop_token_ids", body.stop_token_ids)):
            if max(ids, default=0) >= self.vocabulary_len:
                raise ApiError(400, f"{param}: token ids end at {self.vocabulary_len - 1}", param)

    def _prompt(self, body: Generation) -> tuple[list[int], str]:
        try:
            if isinstance(body, ChatBody):
                return self.tokenizer.render_chat([m.for_template() for m in body.messages]), "messages"
            assert isinstance(body, CompletionBody)
            return self.tokenizer.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt, "prompt"
        except TokenizerError as error:
            raise ApiError(400, str(error), "messages" if isinstance(body, ChatBody) else "prompt") from error


class TextCutter:
    """Committed tokens to text that may be shown: up to the first stop string, wherever it begins and ends.

    Text of the first `min_tokens` tokens is no part of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = stops
        self._min_tokens = min_tokens
        self._pending = ""
        self.num_tokens = 0
        self.is_cut = False

    def push(self, tokens: Sequence[int], is_last: bool) -> str:
        """The text these tokens let be shown; after a stop string `is_cut`, and `num_tokens` ends with its token."""
        shown = ""
        for token in tokens:
            self.num_tokens += 1
            self._pending += self._detokenizer.push([token])
            if self.num_tokens <= self._min_tokens:
                shown, self._pending = shown + self._pending, ""
                continue
            found = min((at for stop in self._stops if (at := self._pending.find(stop)) >= 0), default=None)
            if found is not None:
                self.is_cut = True
                return shown + self._pending[:found]
        if is_last:
            self._pending += self._detokenizer.flush()
        safe = len(self._pending) - (0 if is_last else self._held_back())
        shown, self._pending = shown + self._pending[:safe], self._pending[safe:]
        return shown

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        sizes = range(min(longest, len(self._pending)), 0, -1)
        return next((n for n in sizes if any(stop.startswith(self._pending[-n:]) for stop in self._stops)), 0)


async def pieces(link: RouterLink, message: OpenRequest, cutter: TextCutter) -> AsyncGenerator[Piece, None]:
    """Text as it is committed. After a stop string the router is told to end, and its counts come with the end."""
    async with aclosing(link.generate(message)) as parts:
        async for part in parts:
            ended, was_cut = part.finish_reason is not None, cutter.is_cut
            known = cutter.num_tokens
            text = "" if was_cut else cutter.push(part.tokens, ended)
            if cutter.is_cut and not was_cut and not ended:
                link.cut(message, cutter.num_tokens)
            logprobs = tuple(zip(part.tokens, part.logprobs, strict=False))[: cutter.num_tokens - known]
            if ended or not was_cut:
                reason = FinishReason.STOP if ended and cutter.is_cut else part.finish_reason
                yield Piece(text, cutter.num_tokens, reason, part.metrics, logprobs)
            if ended:
                return
