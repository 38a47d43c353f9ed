"""Requests to an app of emulated models, and what the oracle must know of it."""

import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.client import Answer, StreamError, complete
from benchmarks.emulated_app import EmulatedApp
from benchmarks.oracle import Level
from router.keys import EVERY
from specrelay.endpoint import endpoint_of

Wish = Mapping[str, Any]
"""A request's `speculation`."""

AUTO: Wish = {"mode": "auto"}
OFF: Wish = {"mode": "off"}


def fixed(chain: Sequence[str | list[str]], windows: Sequence[int]) -> Wish:
    return {"mode": "fixed", "chain": list(chain), "windows": list(windows)}


@dataclass(frozen=True, slots=True)
class EmulatedClient:
    app: EmulatedApp
    http: httpx.AsyncClient

    @property
    def names(self) -> list[str]:
        """Cheapest first, the target last."""
        return [model.name for model in self.app.config.models]

    def body(self, prompt: str, tokens: int, speculation: Wish) -> dict[str, Any]:
        model = self.app.config.served_model_id
        wish = {"include_spec_metrics": True, "speculation": speculation}
        return {"model": model, "prompt": prompt, "max_tokens": tokens, **wish}

    async def ask(self, prompt: str, tokens: int, speculation: Wish) -> Answer:
        answer = await complete(self.http, self.body(prompt, tokens, speculation))
        if len(answer.text) != tokens:
            raise StreamError(f"{len(answer.text)} of {tokens} tokens came")
        return answer

    async def table(self) -> dict[str, Any]:
        """GET /router/table, of the pairs those over all requests."""
        response = await self.http.get("/router/table")
        response.raise_for_status()
        table: dict[str, Any] = response.json()
        table["pairs"] = [pair for pair in table["pairs"] if (pair["class"], pair["regime"]) == EVERY]
        return table

    async def hop_ms(self, tokens: int, repeats: int) -> float:
        """Empty rounds: the target alone, taking 0 ms; what is left per round is the way there and back."""
        target = self.app.config.target.name
        base_ms = self.app.emulate[target]["base_ms"]
        self.app.deploy({target: {"base_ms": 0.0}})
        answers = [await self.ask(f"hop {i}", tokens, OFF) for i in range(repeats)]
        self.app.deploy({target: {"base_ms": base_ms}})
        return statistics.median(answer.ms_per_token for answer in answers)

    def levels(self, hop_ms: float) -> list[Level]:
        """As they are set now; agreements must be numbers."""
        return [
            Level(
                values["base_ms"],
                values["agreement"],
                values.get("per_token_ms", 0.0),
                values.get("per_sequence_ms", 0.0),
                hop_ms,
            )
            for values in self.app.emulate.values()
        ]


@asynccontextmanager
async def emulated_client(app: EmulatedApp) -> AsyncIterator[EmulatedClient]:
    """For as many streams at once as one likes; the first request has been answered."""
    config = app.config
    endpoint = endpoint_of(config.http.host, config.http.port, config.security.api_keys_env)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=endpoint.url, headers=endpoint.headers, timeout=120.0, limits=limits) as http:
        client = EmulatedClient(app, http)
        await client.ask("first", 20, AUTO)
        yield client
