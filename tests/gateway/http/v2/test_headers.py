"""Headers that add to a v2 request."""

from starlette.types import Message

from gateway.http.protocol import NAMES_AS_SENT
from gateway.http.v2.exchange import Exchange
from gateway.http.v2.request import HeaderReader
from gateway.options.http import RequestOptions
from serving.request import InferRequest


async def receive() -> Message:
    raise AssertionError("headers are not read from the body")


async def send(message: Message) -> None:
    raise AssertionError("reading headers answers nothing")


def exchange(*headers: tuple[bytes, bytes]) -> Exchange:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v2",
        "headers": [(name.lower(), value) for name, value in headers],
        "extensions": {NAMES_AS_SENT: {"names": [name for name, _ in headers]}},
    }
    return Exchange(scope, receive, send)


def read(pattern: str, *headers: tuple[bytes, bytes]) -> InferRequest:
    request = InferRequest({}, priority=5)
    reader = HeaderReader(RequestOptions(), pattern)
    reader.schedule(exchange(*headers), request)
    reader.forward(exchange(*headers), request)
    return request


def test_ours_say_how_a_request_is_treated_and_are_no_parameters() -> None:
    request = read(
        "",
        (b"X-Sluice-Tenant", b"ada"),
        (b"X-Sluice-Priority", b"2"),
        (b"X-Sluice-Timeout-Ms", b"1500"),
        (b"X-Sluice-Queue-Timeout-Ms", b"250"),
    )
    assert (request.tenant, request.priority, request.timeout_us, request.queue_timeout_us) == (
        "ada",
        2,
        1_500_000,
        250_000,
    )
    assert request.parameters == {}


def test_without_them_the_body_s_word_stands() -> None:
    request = read("", (b"host", b"x"))
    assert (request.tenant, request.priority, request.timeout_us, request.queue_timeout_us) == ("", 5, 0, 0)


def test_those_that_match_are_forwarded_under_the_names_that_were_sent() -> None:
    request = read("x-fwd-.*", (b"X-Fwd-User", b"bob"), (b"x-other", b"z"), (b"x-fwd-b", b""))
    assert request.parameters == {"X-Fwd-User": "bob", "x-fwd-b": ""}
    assert read("", (b"X-Fwd-User", b"bob")).parameters == {}
