"""Requests are told apart by what is cheap to see."""

import pytest

from kvstate.protocol import Sampling
from router.classes import CLASSES, classify, context_of

NEWS = "The council met on Monday to talk about the new bridge, which has been closed for repairs since spring. "


@pytest.mark.parametrize(
    ("text", "request_class"),
    [
        ("Write a haiku about the sea.", "short prose"),
        ("", "short prose"),
        ("Implement quicksort in Python and explain how it works.", "short code"),
        ("for (int i = 0; i < n; ++i) { total[i] += a[i]; }", "short code"),
        ("A train leaves at 9:40 and needs 125 minutes for 180 km. How fast is it?", "short digits"),
        ("17.25 + 185 * 3.8 = ", "short digits"),
        ("def f_535039376(a, b):\n    return a[83] + b.x1\n", "short code"),
        ("Übersetze bitte diesen Satz: Der Hund lief gestern durch den Park.", "short foreign"),
        ("请把这句话翻译成英文。", "short foreign"),
        (NEWS * 4, "short repetitive"),
        (NEWS * 40, "long repetitive"),
    ],
)
def test_class_of_a_text(text: str, request_class: str) -> None:
    assert classify(text) == request_class
    assert request_class in CLASSES


def test_of_a_long_text_the_end_decides() -> None:
    assert classify("{();}" * 2000) == "long code"
    assert classify("{();}" * 2000 + NEWS * 50) == "long repetitive"


@pytest.mark.parametrize(
    ("temperature", "regime"), [(0.0, "greedy"), (1e-6, "greedy"), (0.5, "cool"), (0.51, "warm"), (2.0, "warm")]
)
def test_regime_is_the_temperature_s(temperature: float, regime: str) -> None:
    assert context_of("long code", Sampling(temperature=temperature)) == ("long code", regime)


def test_an_unknown_class_is_a_request_like_all() -> None:
    assert context_of("no such class", Sampling()) == ("all", "greedy")
