"""From bodies to the router's requests, and stop strings in committed text, without a server."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cluster.config import load_config
from deployments.choices import choices_of
from deployments.completions import TextCutter, Translator
from deployments.openai_api import ApiError, CompletionBody, parse_body
from kvstate.protocol import OpenRequest
from models.tokenizer import ByteTokenizer

CONFIG = load_config(Path(__file__).parents[2] / "configs/emulated.yaml")
EOS = ByteTokenizer.END_ID


def opened(**fields: Any) -> OpenRequest:
    body = {"model": CONFIG.served_model_id, "prompt": "x", "max_tokens": 20, **fields}
    translator = Translator(CONFIG, ByteTokenizer(), 4096, 257)
    return translator.open_request(parse_body(json.dumps(body).encode(), CompletionBody, CONFIG))


def test_every_sampling_field_reaches_the_router() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "seed": 2**64 + 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
    }
    sampling = opened(**fields, logit_bias={"70": -5, "3": 1.5}).sampling
    assert {name: getattr(sampling, name) for name in fields} == fields | {"seed": 5}
    assert sampling.logit_bias == ((3, 1.5), (70, -5.0))


@pytest.mark.parametrize(
    ("fields", "waits"),
    [({}, True), ({"stop_token_ids": [5]}, True), ({"stream": True}, False), ({"stop": "a"}, False)],
)
def test_tokens_wait_for_others_where_nobody_looks_at_them_before_the_end(fields: dict[str, Any], waits: bool) -> None:
    assert (opened(**fields).gather_s > 0.0) == waits


@pytest.mark.parametrize(
    ("fields", "stop_ids", "banned_ids", "end_ids"),
    [
        ({}, (EOS,), (), ()),
        ({"stop_token_ids": [5]}, (5, EOS), (), ()),
        ({"min_tokens": 3}, (EOS,), (), (EOS,)),
        ({"ignore_eos": True}, (), (EOS,), ()),
        ({"ignore_eos": True, "min_tokens": 3, "stop_token_ids": [5]}, (5,), (EOS,), (5,)),
    ],
)
def test_case_5_what_ends_and_what_is_masked(
    fields: dict[str, Any], stop_ids: tuple[int, ...], banned_ids: tuple[int, ...], end_ids: tuple[int, ...]
) -> None:
    request = opened(**fields)
    assert (request.stop_ids, request.sampling.banned_ids, request.sampling.end_ids) == (stop_ids, banned_ids, end_ids)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -2.5),
        ("min_p", 1.1),
        ("min_tokens", 21),
        ("min_tokens", -1),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"257": 1}),
        ("logit_bias", {"1": 101}),
        ("stop_token_ids", [257]),
        ("ignore_eos", "yes"),
    ],
)
def test_case_8_a_wrong_value_names_its_field(field: str, value: object) -> None:
    with pytest.raises(ApiError) as caught:
        opened(**{field: value})
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert caught.value.param.startswith(field)


def test_choices_differ_in_their_seeds_only_and_the_first_has_the_requests() -> None:
    request = opened(seed=17)
    choices = choices_of(request, 4)
    assert choices[0] == request
    assert len({choice.sampling.seed for choice in choices}) == 4
    assert {replace(choice, sampling=request.sampling) for choice in choices} == {request}


def shown(text: str, stops: list[str], sizes: list[int], min_tokens: int = 0) -> tuple[list[str], int, bool]:
    """What commits of these sizes let be shown; tokens are bytes."""
    cutter, ids, parts = TextCutter(ByteTokenizer(), stops, min_tokens), list(text.encode()), []
    for i, size in enumerate(sizes):
        parts.append(cutter.push(ids[:size], i == len(sizes) - 1))
        ids = ids[size:]
        if cutter.is_cut:
            break
    return parts, cutter.num_tokens, cutter.is_cut


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([9], ["ab"]),
        ([3, 6], ["ab", ""]),
        ([4, 5], ["ab", ""]),
        ([1] * 9, ["a", "b", "", "", ""]),
        ([2, 7], ["ab", ""]),
    ],
)
def test_case_2_a_stop_string_in_one_block_or_across_blocks(sizes: list[int], parts: list[str]) -> None:
    assert shown("abSTPcSTP", ["STP"], sizes) == (parts, 5, True)


def test_case_2_text_that_only_begins_like_a_stop_is_shown_in_the_end() -> None:
    assert shown("abST", ["STP"], [2, 2]) == (["ab", "ST"], 4, False)
    assert shown("abSTx", ["STP"], [4, 1]) == (["ab", "STx"], 5, False)


def test_of_two_stop_strings_the_first_to_be_complete_cuts() -> None:
    assert shown("one two", ["two", "e t"], [7]) == (["on"], 5, True)


@pytest.mark.parametrize(("min_tokens", "text", "num_tokens"), [(2, "ab", 5), (4, "abSTPc", 9), (8, "abSTPcSTP", 9)])
def test_a_stop_string_that_begins_before_min_tokens_is_no_stop(min_tokens: int, text: str, num_tokens: int) -> None:
    parts, count, is_cut = shown("abSTPcSTP", ["STP"], [9], min_tokens)
    assert ("".join(parts), count, is_cut) == (text, num_tokens, text != "abSTPcSTP")
