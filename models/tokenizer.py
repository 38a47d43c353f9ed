"""Text to token ids and back: the tokenizer of a saved model, plain bytes for emulated models, and streaming decode.

A *fingerprint* names what the ids of a vocabulary mean; models of one chain must agree in it.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not (yet) a character."""


class TokenizerError(Exception):
    """The text cannot be tokenized as asked: a request's fault, or a model without chat template."""


class Tokenizer(Protocol):
    """stop_ids: ids that end an answer · vocabulary: fingerprint."""

    stop_ids: frozenset[int]
    vocabulary: str

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with one BOS where the model wants one."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation up to where the assistant's answer begins; messages have `role` and `content`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids without special tokens; U+FFFD for bytes that are no character."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text, which may be part of a character; a special token's name."""
        ...


class HubTokenizer:
    """The tokenizer saved in a model's folder."""

    def __init__(self, folder: Path, trust_remote_code: bool = False) -> None:
        import transformers  # here, because it takes seconds that users of ByteTokenizer need not spend

        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        own = self._tokenizer.eos_token_id
        self.stop_ids = read_end_ids(folder) | (frozenset() if own is None else frozenset({own}))
        self.vocabulary = read_fingerprint(folder)
        self._special_ids = frozenset(self._tokenizer.all_special_ids)
        self._bytes_of = _byte_letters() if _is_byte_level(self._tokenizer) else {}

    def encode(self, text: str) -> list[int]:
        return self._with_one_bos(self._ids(text, add_special_tokens=True))

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise TokenizerError("the model has no chat template; use /v1/completions")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates are programs of the model's author: they raise what they like
            raise TokenizerError(f"the model's chat template refuses these messages: {error}") from error
        # The template writes BOS itself where the model wants it, so the tokenizer must not add another.
        return self._with_one_bos(self._ids(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def token_bytes(self, token: int) -> bytes:
        name: str | None = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if token in self._special_ids:
            return name.encode()
        if self._bytes_of and set(name) <= self._bytes_of.keys():
            return bytes(self._bytes_of[letter] for letter in name)
        single = re.fullmatch("<0x([0-9A-F]{2})>", name)
        return bytes.fromhex(single[1]) if single else name.replace("▁", " ").encode()

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair; the tokenizer's own error is a TypeError
            raise TokenizerError(f"the text is no valid Unicode: {error.reason}") from error
        return [int(token) for token in self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]]

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        """Drop the second of two leading BOS: the text already began with the one that the tokenizer added."""
        bos = self._tokenizer.bos_token_id
        doubled = bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos
        return ids[1:] if doubled else ids


class ByteTokenizer:
    """Ids 0–255 are bytes of UTF-8, 256 ends an answer. The chat template joins the contents with newlines."""

    END_ID = 256

    def __init__(self) -> None:
        self.stop_ids = frozenset({self.END_ID})
        self.vocabulary = "bytes+eos"

    def encode(self, text: str) -> list[int]:
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text is no valid Unicode: {error.reason}") from error

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("\n".join(message["content"] for message in messages))

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < self.END_ID else b""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < self.END_ID).decode(errors="replace")


class IncrementalDetokenizer:
    """Turns committed tokens into text deltas whose concatenation is the decode of all tokens.

    A delta never ends inside a character: tokens whose text ends in U+FFFD wait for the next ones. Each token is
    decoded behind the last tokens already given out, because decoders treat the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # the last tokens whose text was given out
        self._waiting: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Text that the new tokens complete; may be empty."""
        return "".join(self._push_one(token) for token in ids)

    def flush(self) -> str:
        """Text of the tokens that still wait; what is no character in them becomes U+FFFD."""
        text = self._fresh_text()
        self._advance()
        return text

    def _push_one(self, token: int) -> str:
        self._waiting.append(token)
        text = self._fresh_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._advance()
        return text

    def _fresh_text(self) -> str:
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode(self._shown + self._waiting)[len(before) :]

    def _advance(self) -> None:
        if self._waiting:
            self._shown, self._waiting = self._waiting, []


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether its tokens are written in one letter per byte, as GPT-2's are."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and "ByteLevel" in json.dumps(json.loads(backend.to_str())["decoder"])


def _byte_letters() -> dict[str, int]:
    """Letter → byte of GPT-2's vocabulary: bytes that print stand for themselves, the others for 256, 257, …"""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Short hex name of what each id means."""
    pairs = json.dumps(sorted(vocabulary.items()), ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(pairs.encode()).hexdigest()[:16]


def read_vocabulary(folder: Path) -> dict[str, int] | None:
    """Token → id of a saved tokenizer; None where the folder has none.

    Reads `tokenizer.json` itself where it can, because the general way imports libraries for seconds.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        saved = json.loads(path.read_text(encoding="utf-8"))
        model = saved["model"].get("vocab", {})
        tokens = dict(model) if isinstance(model, dict) else {entry[0]: index for index, entry in enumerate(model)}
        return tokens | {added["content"]: added["id"] for added in saved.get("added_tokens", [])}
    if not (folder / "tokenizer_config.json").is_file():
        return None
    import transformers

    return dict(transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab())


def read_fingerprint(folder: Path) -> str:
    """Fingerprint of a saved tokenizer; `none` where the folder has none."""
    vocabulary = read_vocabulary(folder)
    return "none" if vocabulary is None else fingerprint(vocabulary)


def read_end_ids(folder: Path) -> frozenset[int]:
    """Ids that end an answer, as the model's saved configurations name them: one id, a list, or none."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)
