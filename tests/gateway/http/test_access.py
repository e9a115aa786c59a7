import asyncio

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.access.control import AccessControl
from gateway.access.ring import KeyRing
from gateway.calls import CallLog
from gateway.http.access import CallMiddleware
from gateway.http.request import RequestIdMiddleware

KEY = "sesame-\u00e9"  # what is not ASCII travels as UTF-8


async def inner(scope: Scope, receive: Receive, send: Send) -> None:
    await Response(b"inside")(scope, receive, send)


def get(path: str, value: bytes | None = None, name: bytes = b"authorization") -> httpx.Response:
    headers = {} if value is None else {name: value}

    async def ask() -> httpx.Response:
        calls = CallLog(AccessControl(KeyRing(None, KEY)))
        guarded = RequestIdMiddleware(CallMiddleware(inner, calls, str), lambda path, status: None)
        transport = httpx.ASGITransport(guarded)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize("path", ["/health", "/ping", "/v2/health/live", "/v2/health/ready"])
def test_health_is_open(path: str) -> None:
    assert get(path).text == "inside"


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/chat/completions", "/tokenize", "/v2", "/v2/models/x", "/metrics", "/docs"]
)
def test_everything_else_asks_for_the_key(path: str) -> None:
    response = get(path)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == 'Bearer realm="sluice"'
    assert get(path, f"Bearer {KEY}".encode()).text == "inside"


@pytest.mark.parametrize(
    ("authorization", "said"),
    [
        (b"Bearer wrong", "the API key is wrong"),
        (b"Bearer ", "the API key is wrong"),
        (b"Bearer \xff\xfe", "the API key is wrong"),
        (f"Bearer {KEY}x".encode(), "the API key is wrong"),
        (f"Basic {KEY}".encode(), "the Authorization header must read 'Bearer KEY'"),
        (KEY.encode(), "the Authorization header must read 'Bearer KEY'"),
    ],
)
def test_a_wrong_key_is_refused_and_not_repeated(authorization: bytes, said: str) -> None:
    response = get("/v1/models", authorization)
    assert response.status_code == 401
    error = response.json()["error"]
    assert (error["message"], error["type"]) == (said, "authentication_error")


def test_the_scheme_s_case_does_not_matter() -> None:
    assert get("/v1/models", f"bearer {KEY}".encode()).text == "inside"


@pytest.mark.parametrize("path", ["/v2", "/api/chat"])
def test_v2_and_ollama_are_refused_in_their_own_shape(path: str) -> None:
    assert get(path).json() == {"error": "this server asks for an API key: send the header 'Authorization: Bearer KEY'"}


@pytest.mark.parametrize("path", ["/v2/health/live/../../models", "/healthz", "/v2/health", "/health/"])
def test_what_only_looks_like_health_is_guarded(path: str) -> None:
    assert get(path).status_code == 401


def test_anthropics_clients_send_the_key_in_a_header_of_their_own() -> None:
    assert get("/v1/messages", name=b"x-api-key", value=KEY.encode()).text == "inside"
    refused = get("/v1/messages", name=b"x-api-key", value=b"wrong")
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert get("/v1/models", name=b"x-api-key", value=KEY.encode()).status_code == 401
