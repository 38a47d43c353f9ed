"""Where a running app answers, and one JSON request to it. Knows neither Ray nor the config file."""

import os
from dataclasses import dataclass, field
from typing import Any

import httpx

from specrelay.exits import Failed, Refused

CONNECT_TIMEOUT_S = 5.0
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  what a server binds, and how to reach it from here


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The base URL of an app and the headers that it wants."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)


def endpoint_of(host: str, port: int, api_keys_env: str | None = None, *, scheme: str = "http") -> Endpoint:
    """The endpoint a config describes; the first of its comma-separated API keys authorises."""
    reachable = ANY_ADDRESS.get(host, host)
    reachable = f"[{reachable}]" if ":" in reachable else reachable
    return Endpoint(f"{scheme}://{reachable}:{port}", key_headers(api_keys_env))


def endpoint_at(url: str, key_env: str | None = None) -> Endpoint:
    """The endpoint a user names: with or without the scheme and the /v1 that OpenAI's clients want."""
    base = url if "://" in url else f"http://{url}"
    return Endpoint(base.rstrip("/").removesuffix("/v1"), key_headers(key_env))


def key_headers(api_keys_env: str | None) -> dict[str, str]:
    """The Authorization header from the environment variable of that name; none where it is unset."""
    key = os.environ.get(api_keys_env, "").split(",")[0].strip() if api_keys_env else ""
    return {"Authorization": f"Bearer {key}"} if key else {}


def get_json(endpoint: Endpoint, path: str) -> dict[str, Any]:
    """GET `path`; Failed when nobody answers there or the answer is not this app's."""
    try:
        response = httpx.get(endpoint.url + path, headers=endpoint.headers, timeout=CONNECT_TIMEOUT_S)
    except httpx.TransportError as error:
        fix = "name its address with --url, or start one: python -m specrelay serve CONFIG"
        raise Failed(f"no app answers at {endpoint.url} ({error}): {fix}") from error
    if response.status_code != httpx.codes.OK:
        raise Failed(f"{endpoint.url}{path}: {error_message(response)}")
    return json_object(response, endpoint)


def json_object(response: httpx.Response, endpoint: Endpoint) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError as error:
        raise Refused(f"what answers at {endpoint.url} is not SpecRelay: choose another port") from error
    if not isinstance(body, dict):
        raise Refused(f"what answers at {endpoint.url} is not SpecRelay: choose another port")
    return body


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The `error` object of a refused request; one is made up from the status where the body has none."""
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        error = None
    if isinstance(error, dict):
        return error
    return {
        "message": f"HTTP {response.status_code}",
        "type": "server_error",
        "param": None,
        "code": response.status_code,
    }


def error_message(response: httpx.Response) -> str:
    return str(error_of(response).get("message"))
