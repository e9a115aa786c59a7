import asyncio

import httptools
import pytest

from sluice.load.config import LoadConfigError
from sluice.load.connection import ConnectionPool, ResponseReceiver, encode_request
from sluice.load.run import run_load
from sluice.load.stream import FailureKind
from tests.load.scripted_server import (
    ScriptedServer,
    Wire,
    good_stream,
    load_config,
    only_failure,
    run_against,
    serving,
)


def server_after(num_requests: int, concurrency: int) -> ScriptedServer:
    async def scenario() -> ScriptedServer:
        async with serving(good_stream) as server:
            await run_load(load_config(server.url, num_requests=num_requests, concurrency=concurrency))
            return server

    return asyncio.run(scenario())


def test_connections_are_used_again() -> None:
    assert server_after(num_requests=6, concurrency=2).num_connections == 2


async def until_closed(wire: Wire) -> None:
    wire.writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
    for _ in range(3):
        wire.writer.write(b'data: {"choices": [{"text": "a"}]}\n\n')
    wire.writer.write(b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n')
    wire.writer.close()


def test_a_body_may_end_with_the_connection() -> None:
    assert run_against(until_closed, num_requests=2).summary.num_served == 2


async def not_http(wire: Wire) -> None:
    wire.writer.write(b"220 smtp.example.com ESMTP\r\n")


def test_a_server_that_does_not_speak_http_is_a_connection_failure() -> None:
    failure = only_failure(not_http)
    assert failure.kind is FailureKind.CONNECTION
    assert "does not speak HTTP" in failure.detail


async def closes_at_once(wire: Wire) -> None:
    wire.writer.close()


def test_a_connection_closed_without_an_answer() -> None:
    assert "closed the connection" in only_failure(closes_at_once).detail


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://me:secret@host"])
def test_urls_must_be_http(url: str) -> None:
    with pytest.raises(LoadConfigError, match="url"):
        ConnectionPool(url, lambda: 0.0)


def test_requests_keep_the_path_of_the_url() -> None:
    request = encode_request("POST", "http://host:1/base/", "/v1/x", (("X-A", "b"),), b"{}")
    assert request.startswith(b"POST /base/v1/x HTTP/1.1\r\nHost: host:1\r\nX-A: b\r\n")
    assert request.endswith(b"Content-Length: 2\r\n\r\n{}")


class BrokenReceiver(ResponseReceiver):
    def on_status(self, status: int) -> None:
        raise RuntimeError("our own bug")

    def on_body(self, piece: bytes, at: float) -> None:
        raise AssertionError("never reached")


def test_a_fault_of_the_receiver_is_not_blamed_on_the_server() -> None:
    async def scenario() -> None:
        async with serving(good_stream) as server:
            pool = ConnectionPool(server.url, lambda: 0.0)
            connection = await pool.acquire()
            request = encode_request("GET", server.url, "/v1/models", ())
            with pytest.raises(httptools.HttpParserCallbackError) as failure:
                await connection.exchange(request, BrokenReceiver())
            assert isinstance(failure.value.__context__, RuntimeError)

    asyncio.run(scenario())
