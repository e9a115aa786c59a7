"""How clients of each protocol send the server's own key, and how they are refused without it."""

import asyncio

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sluice.gateway.calls import CallLog
from sluice.gateway.front.http.guard import Guard, GuardMiddleware
from sluice.gateway.tenancy.access.control import AccessControl
from sluice.gateway.tenancy.access.ring import KeyRing

KEY = "sesame-\u00e9".encode()  # what is not ASCII travels as UTF-8


async def inner(scope: Scope, receive: Receive, send: Send) -> None:
    await Response(b"inside")(scope, receive, send)


def get(path: str, **headers: bytes) -> httpx.Response:
    async def ask() -> httpx.Response:
        calls = CallLog(AccessControl(KeyRing(None, KEY.decode())))
        guarded = GuardMiddleware(inner, Guard(calls, lambda path, status: None, str))
        sent = {name.replace("_", "-").encode(): value for name, value in headers.items()}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://test") as client:
            return await client.get(path, headers=sent)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        *((path, {}) for path in ("/health", "/ping", "/v2/health/live", "/v2/health/ready")),
        ("/v1/models", {"authorization": b"Bearer " + KEY}),
        ("/v1/models", {"authorization": b"bearer " + KEY}),
        ("/v1/messages", {"x_api_key": KEY}),
    ],
)
def test_who_is_let_in(path: str, headers: dict[str, bytes]) -> None:
    assert get(path, **headers).text == "inside"


WRONG = "the API key is wrong"
FORM = "the Authorization header must read 'Bearer KEY'"
ASKED = "this server asks for an API key: send the header 'Authorization: Bearer KEY'"


@pytest.mark.parametrize(
    ("path", "headers", "said"),
    [
        ("/v1/models", {}, ASKED),
        ("/v1/models", {"x_api_key": KEY}, ASKED),
        ("/v1/models", {"authorization": b"Bearer wrong"}, WRONG),
        ("/v1/models", {"authorization": b"Bearer "}, WRONG),
        ("/v1/models", {"authorization": b"Bearer \xff\xfe"}, WRONG),
        ("/v1/models", {"authorization": b"Bearer " + KEY + b"x"}, WRONG),
        ("/v1/models", {"authorization": b"Basic " + KEY}, FORM),
        ("/v1/models", {"authorization": KEY}, FORM),
        ("/v1/messages", {"x_api_key": b"wrong"}, WRONG),
        *((path, {}, ASKED) for path in ("/healthz", "/health/")),
    ],
)
def test_who_is_refused_and_told_why_without_the_key(path: str, headers: dict[str, bytes], said: str) -> None:
    response = get(path, **headers)
    assert (response.status_code, response.headers["www-authenticate"]) == (401, 'Bearer realm="sluice"')
    error = response.json()["error"]
    assert (error["message"], error["type"]) == (said, "authentication_error")


@pytest.mark.parametrize("path", ["/v2", "/api/chat", "/v2/health", "/v2/health/live/../../models"])
def test_v2_and_ollama_are_refused_in_their_own_shape(path: str) -> None:
    assert get(path).json() == {"error": ASKED}
