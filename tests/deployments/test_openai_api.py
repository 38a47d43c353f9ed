"""Bodies without a server: what counts as not given, and what a template gets."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.config import load_config
from deployments.openai_api import ApiError, ChatBody, CompletionBody, parse_body

CONFIG = load_config(Path(__file__).parents[2] / "configs/emulated.yaml")


def completion(**fields: Any) -> CompletionBody:
    body = {"model": CONFIG.served_model_id, "prompt": "x", **fields}
    return parse_body(json.dumps(body).encode(), CompletionBody, CONFIG)


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
        {"logprobs": None, "logit_bias": {}, "best_of": 1, "echo": False, "min_p": 0.0},
        {"stop": "", "seed": None},
    ],
)
def test_values_that_ask_for_nothing_are_taken(fields: dict[str, Any]) -> None:
    assert completion(**fields) == completion(stop="") or completion(**fields) == completion()


@pytest.mark.parametrize(("name", "value"), [("tools", [{}]), ("best_of", 2), ("suffix", "x")])
def test_a_field_that_is_not_served_is_named(name: str, value: object) -> None:
    with pytest.raises(ApiError, match="not supported yet") as caught:
        completion(**{name: value})
    assert (caught.value.status, caught.value.param) == (400, name)


def chat(content: object) -> ChatBody:
    body = {"model": CONFIG.served_model_id, "messages": [{"role": "user", "content": content}]}
    return parse_body(json.dumps(body).encode(), ChatBody, CONFIG)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert chat(parts).messages[0].for_template() == {"role": "user", "content": "one two"}
    assert chat("one two").messages[0].for_template() == chat(parts).messages[0].for_template()


def test_a_part_that_is_no_text_is_refused_by_its_place() -> None:
    with pytest.raises(ApiError) as caught:
        chat([{"type": "image_url", "image_url": {"url": "http://x"}}])
    assert (caught.value.status, caught.value.param) == (400, "messages.0.content.0.type")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_k": 10**30}, "top_k"),
        ({"speculation": {"mode": "fixed", "chain": ["m1b", "m70b"], "windows": [10**30]}}, "speculation.windows.0"),
    ],
)
def test_numbers_that_no_frame_can_carry_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "chain",
    [["m70b"], ["m68", "m70b"], ["m68", "m1b", "m8b", "m70b"], ["m8b+m68", "m70b"], ["m1b+m68", "m8b", "m70b"]],
)
def test_chains_that_can_be_wished(chain: list[str]) -> None:
    assert completion(speculation={"mode": "fixed", "chain": chain}).speculation.chain == chain


@pytest.mark.parametrize(
    "chain",
    [[], ["m68"], ["m1b", "m68", "m70b"], ["m68+m8b", "m70b"], ["m8b+", "m1b"], ["m8b+m8b", "m70b"], ["m70b+m68"]]
    + [["m8b+no", "m70b"], ["m68", "m8b+m1b", "m70b"], ["m8b+m1b+m68", "m70b"], ["", "m70b"], ["+m68", "m70b"]],
)
def test_chains_that_cannot(chain: list[str]) -> None:
    with pytest.raises(ApiError) as caught:
        completion(speculation={"mode": "fixed", "chain": chain})
    assert (caught.value.status, caught.value.param) == (400, "speculation.chain")


def test_how_many_logprobs_are_wanted() -> None:
    messages = [{"role": "user", "content": "x"}]

    def chat_with(**fields: Any) -> ChatBody:
        body = {"model": CONFIG.served_model_id, "messages": messages, **fields}
        return parse_body(json.dumps(body).encode(), ChatBody, CONFIG)

    assert [chat_with(**f).num_logprobs for f in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 4})] == [
        -1,
        0,
        4,
    ]
    assert [completion(**f).num_logprobs for f in ({}, {"logprobs": 0}, {"logprobs": 5})] == [-1, 0, 5]
    with pytest.raises(ApiError, match="needs logprobs") as caught:
        chat_with(top_logprobs=2)
    assert caught.value.param == "top_logprobs"
