"""The HTTP surface: routes, answers, server-sent events. Everything about tokens happens elsewhere."""

import json
import os
import secrets
from collections.abc import AsyncIterator, Mapping

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from cluster.config import config_hash, parse_config
from cluster.dialer import Dialer
from deployments.backends import build_tokenizer, context_len
from deployments.completions import Piece, Shape, Translator, pieces, spec_metrics, usage_of
from deployments.openai_api import ApiError, ChatBody, CompletionBody, parse_body
from deployments.router_link import RouterLink
from deployments.streams import endpoint
from kvstate.protocol import OpenRequest

api = FastAPI(title="SpecRelay", docs_url=None, redoc_url=None)

AnyBody = ChatBody | CompletionBody


@api.exception_handler(ApiError)
async def _api_error(_: Request, error: ApiError) -> JSONResponse:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(max(1, round(error.retry_after_s)))}
    return JSONResponse(error.body(), error.status, headers)


@api.exception_handler(HTTPException)
async def _http_error(_: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse(ApiError(error.status_code, str(error.detail)).body(), error.status_code)


@serve.ingress(api)
class Ingress:
    """Validates and tokenizes, opens the request on its stream to the router, writes what comes back."""

    async def __init__(
        self, data: Mapping[str, object], router: DeploymentHandle, replicas: list[DeploymentHandle]
    ) -> None:
        del replicas  # only keeps the models' deployments in the app's graph
        self._config = config = parse_config(data, str(data.get("name", "app")))
        self._router = router
        self._translator = Translator(config, build_tokenizer(config), context_len(config))
        keys = config.security.api_keys_env
        self._keys = frozenset(k.strip() for k in os.environ[keys].split(",") if k.strip()) if keys else None
        name = f"ingress-{secrets.token_hex(6)}"
        self._link = RouterLink(name)
        own = endpoint("ingress", name, config.security.stream_token_env)
        self._link.attach(Dialer(own, lambda: router.endpoint.remote(), self._link.callbacks))

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
        can_serve = await self._router.can_serve.remote()
        body = {"status": "ok" if can_serve else "no target", "config_hash": config_hash(self._config)}
        return JSONResponse(body, 200 if can_serve else 503)

    @api.get("/metrics")
    async def metrics(self) -> Response:
        return PlainTextResponse(await self._router.metrics_text.remote())

    @api.get("/router/table")
    async def table(self) -> Response:
        return JSONResponse(await self._router.table.remote())

    # ------------------------------------------------------------------------------------------------------ requests

    def _authorize(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if self._keys is not None and not any(secrets.compare_digest(given, key) for key in self._keys):
            raise ApiError(401, "missing or wrong API key")

    async def _complete(self, request: Request, kind: type[AnyBody]) -> Response:
        self._authorize(request)
        body = parse_body(await self._read(request), kind, self._config)
        message = self._translator.open_request(body)
        shape = Shape.new(self._config.served_model_id, kind is ChatBody)
        parts = pieces(self._link, message, self._translator.tokenizer, body.stops)
        if not body.stream:
            return JSONResponse(await _whole(parts, shape, body, message))
        first = await anext(parts)  # errors before the first token are plain HTTP errors
        return StreamingResponse(_events(first, parts, shape, body, message), media_type="text/event-stream")

    async def _read(self, request: Request) -> bytes:
        """The body, but never much more of it than is allowed."""
        limit, raw = self._config.http.max_body_bytes, bytearray()
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > limit:
                raise ApiError(413, f"the body has more than {limit} bytes (http.max_body_bytes)")
        return bytes(raw)


async def _whole(parts: AsyncIterator[Piece], shape: Shape, body: AnyBody, message: OpenRequest) -> dict[str, object]:
    text, last = "", Piece("", 0)
    async for piece in parts:
        text, last = text + piece.text, piece
    answer = shape.whole(text, last.finish_reason, usage_of(message, last.output_len))
    if body.include_spec_metrics and last.metrics is not None:
        answer["metrics"] = spec_metrics(last.metrics)
    return answer


async def _events(
    first: Piece, parts: AsyncIterator[Piece], shape: Shape, body: AnyBody, message: OpenRequest
) -> AsyncIterator[str]:
    """One event per commit; an error after the first token is an event too."""
    piece = first
    yield _event(_chunk(first, shape, body, is_first=True))
    try:
        async for piece in parts:
            yield _event(_chunk(piece, shape, body, is_first=False))
    except ApiError as error:
        yield _event(error.body())
        return
    if body.stream_options is not None and body.stream_options.include_usage:
        yield _event(shape.usage_chunk(usage_of(message, piece.output_len)))
    yield "data: [DONE]\n\n"


def _chunk(piece: Piece, shape: Shape, body: AnyBody, is_first: bool) -> dict[str, object]:
    chunk = shape.chunk(piece.text, piece.finish_reason, is_first)
    if body.include_spec_metrics and piece.metrics is not None:
        chunk["metrics"] = spec_metrics(piece.metrics)
    return chunk


def _event(data: Mapping[str, object]) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
