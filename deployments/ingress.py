"""The HTTP surface: routes, answers, server-sent events. Everything about tokens happens elsewhere."""

import asyncio
import os
import secrets
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from cluster.config import config_hash, parse_config
from cluster.dialer import Dialer
from deployments.answers import Shape, Writer
from deployments.backends import build_tokenizer, context_len, vocabulary_len
from deployments.choices import choices_of, merged
from deployments.completions import TextCutter, Translator, pieces
from deployments.openai_api import ApiError, ChatBody, CompletionBody, parse_body
from deployments.router_link import RouterLink
from deployments.streams import endpoint

CALL_S = 2.0
BODY_S = 60.0

api = FastAPI(title="SpecRelay", docs_url=None, redoc_url=None)


@api.exception_handler(ApiError)
async def _api_error(_: Request, error: ApiError) -> JSONResponse:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(max(1, round(error.retry_after_s)))}
    return JSONResponse(error.body(), error.status, headers)


@api.exception_handler(HTTPException)
async def _http_error(_: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse(ApiError(error.status_code, str(error.detail)).body(), error.status_code)


@api.exception_handler(Exception)
async def _internal_error(_: Request, error: Exception) -> JSONResponse:
    """Starlette logs the traceback; the client gets OpenAI's shape."""
    if isinstance(error, RayError | RayServeException | TimeoutError):
        return await _api_error(_, ApiError(503, "the router is being restarted", retry_after_s=1.0))
    return JSONResponse(ApiError(500, "internal error").body(), 500)


@serve.ingress(api)
class Ingress:
    """Validates and tokenizes, opens the request on its stream to the router, writes what comes back."""

    # mypy knows no async constructor; Serve awaits it.
    async def __init__(  # type: ignore[misc]
        self, data: Mapping[str, object], router: DeploymentHandle[Any], replicas: list[DeploymentHandle[Any]]
    ) -> None:
        del replicas  # only keeps the models' deployments in the app's graph
        self._config = config = parse_config(data, str(data.get("name", "app")))
        self._router = router
        self._translator = Translator(config, build_tokenizer(config), context_len(config), vocabulary_len(config))
        keys = config.security.api_keys_env
        self._keys = frozenset(k.strip() for k in os.environ[keys].split(",") if k.strip()) if keys else None
        name = f"ingress-{secrets.token_hex(6)}"
        self._link = RouterLink(name)
        own = endpoint("ingress", name, config.security.stream_token_env)
        self._link.attach(Dialer(own, router.endpoint.remote, self._link.callbacks))

    @api.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Response:
        return await self._complete(request, ChatBody)

    @api.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        return await self._complete(request, CompletionBody)

    @api.get("/v1/models")
    async def models(self, request: Request) -> Response:
        self._authorize(request)
        model = {"id": self._config.served_model_id, "object": "model", "created": 0, "owned_by": "specrelay"}
        return JSONResponse({"object": "list", "data": [model]})

    @api.get("/health")
    async def health(self) -> Response:
        """200 only when a target can serve."""
        try:
            async with asyncio.timeout(CALL_S):
                can_serve = await self._router.can_serve.remote()
        except (TimeoutError, RayError, RayServeException):  # the router is being restarted
            can_serve = False
        body = {"status": "ok" if can_serve else "no target", "config_hash": config_hash(self._config)}
        return JSONResponse(body, 200 if can_serve else 503)

    @api.get("/metrics")
    async def metrics(self) -> Response:
        """Open to scrapers, like /health: counts and times only."""
        async with asyncio.timeout(CALL_S):
            return PlainTextResponse(await self._router.metrics_text.remote())

    @api.get("/router/table")
    async def table(self, request: Request) -> Response:
        self._authorize(request)
        async with asyncio.timeout(CALL_S):
            return JSONResponse(await self._router.table.remote())

    # ------------------------------------------------------------------------------------------------------ requests

    def _authorize(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip().encode()
        if self._keys is not None and not any(secrets.compare_digest(given, key.encode()) for key in self._keys):
            raise ApiError(401, "missing or wrong API key")

    async def _complete(self, request: Request, kind: type[ChatBody] | type[CompletionBody]) -> Response:
        self._authorize(request)
        body = parse_body(await self._read(request), kind, self._config)
        message = self._translator.open_request(body)
        tokenizer = self._translator.tokenizer
        shape = Shape.new(self._config.served_model_id, kind is ChatBody, self._translator.echo(body))
        writer = Writer(shape, body, message, tokenizer)
        parts = merged(
            [
                pieces(self._link, choice, TextCutter(tokenizer, body.stops, body.min_tokens))
                for choice in choices_of(message, body.n)
            ]
        )
        if not body.stream:
            return JSONResponse(await writer.whole(parts))
        first = await anext(parts)  # errors before the first token are plain HTTP errors
        return StreamingResponse(writer.events(first, parts), media_type="text/event-stream")

    async def _read(self, request: Request) -> bytes:
        """The body, but never much more of it than is allowed."""
        limit, raw = self._config.http.max_body_bytes, bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    raw += chunk
                    if len(raw) > limit:
                        raise ApiError(413, f"the body has more than {limit} bytes (http.max_body_bytes)")
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_S:g} s") from None
        return bytes(raw)
