"""Log-probabilities of output tokens in OpenAI's two shapes."""

from collections.abc import Sequence

from kvstate.protocol import Logprobs
from models.tokenizer import Tokenizer

Entry = tuple[int, Logprobs]
"""A token id and its log-probabilities."""


class LogprobWriter:
    """Of one choice of an answer, part after part: `text_offset` counts on."""

    def __init__(self, tokenizer: Tokenizer, is_chat: bool) -> None:
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._offset = 0

    def write(self, entries: Sequence[Entry]) -> dict[str, object]:
        return {"content": [self._content(*entry) for entry in entries]} if self._is_chat else self._columns(entries)

    def _content(self, token: int, given: Logprobs) -> dict[str, object]:
        tops = [self._named(other, logprob) for other, logprob in given.top]
        return self._named(token, given.logprob) | {"top_logprobs": tops}

    def _named(self, token: int, logprob: float) -> dict[str, object]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": _text(raw), "logprob": logprob, "bytes": list(raw)}

    def _columns(self, entries: Sequence[Entry]) -> dict[str, object]:
        texts = [_text(self._tokenizer.token_bytes(token)) for token, _ in entries]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        tops = [
            {_text(self._tokenizer.token_bytes(token)): logprob for token, logprob in given.top} for _, given in entries
        ]
        return {
            "tokens": texts,
            "token_logprobs": [given.logprob for _, given in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _text(raw: bytes) -> str:
    """Part of a character shows as U+FFFD; chat answers have the bytes beside it."""
    return raw.decode(errors="replace")
