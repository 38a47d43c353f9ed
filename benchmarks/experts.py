"""Drafters that are each good at one of several subjects: as models, prompts and stages of what they do together."""

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstate.protocol import Speculation

SUBJECTS = ("code", "math", "law", "tale")
WORDS = {
    "code": ("function", "returns", "list", "index", "loop", "string", "class", "error", "parse", "buffer"),
    "math": ("sum", "prime", "angle", "integral", "matrix", "limit", "proof", "ratio", "square", "series"),
    "law": ("tenant", "contract", "court", "clause", "liable", "notice", "party", "damages", "appeal", "lease"),
    "tale": ("dragon", "forest", "castle", "winter", "river", "lantern", "sailor", "garden", "letter", "stranger"),
}
EXPERT, WEAK = 0.85, 0.45
NUM_DRAFTERS = 8
TARGET = "target"
DRAFTERS = tuple(f"drafter-{i}" for i in range(NUM_DRAFTERS))
NAMES = (*DRAFTERS, TARGET)
LEVELS = dict.fromkeys(DRAFTERS, 1) | {TARGET: 2}


def subject_of(number: int) -> str:
    """Of the nth request: all subjects come equally often, in an order that is no cycle."""
    return SUBJECTS[zlib.crc32(f"subject {number}".encode()) % len(SUBJECTS)]


def prompt_of(title: str, number: int) -> str:
    """Begins with the subject's name, by which the emulated drafters know theirs, and goes on with words of it."""
    subject = subject_of(number)
    rng = random.Random(f"{title} {number}")
    return f"{subject}: " + " ".join(rng.choices(WORDS[subject], k=8)) + "?"


def experts_in(subject: str) -> list[str]:
    return [name for i, name in enumerate(DRAFTERS) if SUBJECTS[i % len(SUBJECTS)] == subject]


def agreement_of(number: int) -> dict[str, float]:
    """Of the nth drafter: an expert in the nth subject, in turn."""
    own = SUBJECTS[number % len(SUBJECTS)]
    return {f"{s}: ": EXPERT if s == own else WEAK for s in SUBJECTS} | {"default": WEAK}


def emulate(errors: str = "own", target_row_ms: float = 0.0) -> dict[str, dict[str, Any]]:
    """By model: 3 ms for a drafter's batch, 45 ms for the target's."""
    common = {"errors": errors, "confidence_spread": 0.2}
    models: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(DRAFTERS):
        models[name] = {"base_ms": 3.0, "agreement": agreement_of(i), **common}
    models[TARGET] = {"base_ms": 45.0, "per_token_ms": target_row_ms, "agreement": 1.0, "errors": errors}
    return models


@dataclass(frozen=True, slots=True)
class Stage:
    """`router`: its settings; `picks`: how the nth request's drafter is chosen, None where the router chooses."""

    router: Mapping[str, Any]
    picks: str | None = None

    def speculation(self, number: int) -> Speculation:
        match self.picks:
            case None:
                return Speculation()
            case "random":
                return Speculation("fixed", (random.Random(number).choice(DRAFTERS), TARGET))
            case _:
                experts = experts_in(subject_of(number))
                return Speculation("fixed", (experts[number % len(experts)], TARGET))


ALONE = {"cooperate": 1, "tree_nodes": 0, "draft_ahead": False}
FULL = {"cooperate": 3, "tree_nodes": 32, "draft_ahead": True}
LADDER = {
    "random drafter": Stage(ALONE, "random"),
    "routed": Stage(ALONE),
    "+ fusion of 3": Stage({**ALONE, "cooperate": 3}),
    "+ tree": Stage({**FULL, "draft_ahead": False}),
    "+ pipeline": Stage(FULL),
}
ORACLE = Stage(ALONE, "expert")
"""Knows the experts; windows are planned for it as for all."""
