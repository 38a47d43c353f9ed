"""Text to ids and back, over a byte-level tokenizer whose every character beyond ASCII takes several tokens."""

import json
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from models.tokenizer import ByteTokenizer, HubTokenizer, IncrementalDetokenizer, Tokenizer, TokenizerError

TEXTS = ["plain", "naïve café", "日本語のテキスト", "👩‍👩‍👧‍👦 and 🇯🇵!", "e\u0301 combining\u0308 marks", "नमस्ते"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def save_tokenizer(folder: Path, chat_template: str | None = TEMPLATE) -> Path:
    """Bytes as tokens, BOS added to plain prompts by the tokenizer itself."""
    vocabulary = {"<s>": 0, "</s>": 1} | {c: i + 2 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1}))
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> HubTokenizer:
    return HubTokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def deltas(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.push([token]) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_case_19_no_delta_splits_a_character(hub: HubTokenizer, text: str) -> None:
    for tokenizer in (hub, ByteTokenizer()):
        given_out = deltas(tokenizer, tokenizer.encode(text))
        assert "".join(given_out) == text
        assert "\ufffd" not in "".join(given_out)


def test_case_19_the_tail_is_flushed(hub: HubTokenizer) -> None:
    ids = hub.encode("ok 👍")[:-1]
    assert "".join(deltas(hub, ids)) == hub.decode(ids)
    assert hub.decode(ids).startswith("ok \ufffd")


@given(st.text(max_size=30), st.lists(st.integers(1, 5), max_size=40))
def test_deltas_join_to_the_text_however_commits_cut_it(text: str, sizes: list[int]) -> None:
    tokenizer = ByteTokenizer()
    ids, detokenizer, shown, at = tokenizer.encode(text), IncrementalDetokenizer(tokenizer), "", 0
    for size in [*sizes, len(ids) + 1]:
        shown += detokenizer.push(ids[at : at + size])
        at += size
    assert shown + detokenizer.flush() == text


def test_case_20_bos_comes_once(hub: HubTokenizer) -> None:
    chat = hub.render_chat([{"role": "user", "content": "hi"}])
    assert (chat.count(0), chat[0]) == (1, 0)
    assert (hub.encode("hi").count(0), hub.encode("<s>hi").count(0)) == (1, 1)


def test_special_tokens_are_no_text(hub: HubTokenizer) -> None:
    assert hub.decode([0, *hub.encode("hi")[1:], 1]) == "hi"
    assert hub.stop_ids == frozenset({1})


def test_a_template_that_refuses_or_is_missing_is_the_requests_fault(tmp_path: Path) -> None:
    for name, template, message in (
        ("none", None, "no chat template"),
        ("strict", "{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ):
        tokenizer = HubTokenizer(save_tokenizer(tmp_path / name, template))
        with pytest.raises(TokenizerError, match=message):
            tokenizer.render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("text", ["\ud800", "a\ud83db"])
def test_half_a_surrogate_pair_is_the_requests_fault(hub: HubTokenizer, text: str) -> None:
    for tokenizer in (hub, ByteTokenizer()):
        with pytest.raises(TokenizerError, match="no valid Unicode"):
            tokenizer.encode(text)
        with pytest.raises(TokenizerError, match="no valid Unicode"):
            tokenizer.render_chat([{"role": "user", "content": text}])


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_all_tokens_are_the_bytes_of_the_text(hub: HubTokenizer, text: str) -> None:
    for tokenizer in (hub, ByteTokenizer()):
        ids = [token for token in tokenizer.encode(text) if token not in {0, 1} or tokenizer is not hub]
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert (hub.token_bytes(0), hub.token_bytes(10**6)) == (b"<s>", b"")
