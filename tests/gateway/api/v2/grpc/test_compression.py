"""Messages that come compressed, and what does as if."""

import gzip
import zlib
from typing import Any

import pytest

from sluice.gateway.options.grpc import GrpcOptions
from tests.gateway.api.v2.grpc.http2.calls import ECHO, STREAM, serving_calls
from tests.gateway.api.v2.grpc.http2.client import answer, connected, message, request_fields

PACKED = gzip.compress(b"hello")
TOO_LONG, INTERNAL = 8, 13


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
@pytest.mark.parametrize("size", [0, 10, 3_000_000])
async def test_compressed_requests(encoding: str, pack: Any, size: int) -> None:
    content = bytes(size)
    async with serving_calls() as calls, connected(calls.port) as client:
        client.gives_windows = True
        fields = request_fields(STREAM, [("grpc-encoding", encoding)])
        found = await answer(client, fields, message(pack(content), 1) + message(b"plain"))
        assert (found.status, found.messages) == (0, [content, b"plain"])


@pytest.mark.parametrize("more", [[], [("grpc-encoding", "identity")]])
async def test_a_compressed_message_without_an_encoding(more: list[tuple[str, str]]) -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        for path in (ECHO, STREAM):
            ended = await answer(client, request_fields(path, more), message(gzip.compress(b"x"), 1))
            assert (ended.status, ended.blocks[-1]["grpc-message"]) == (
                INTERNAL,
                "a compressed message in a call without grpc-encoding",
            )


@pytest.mark.parametrize("size", [1 << 20, 32 << 20], ids=["on the loop", "on a thread"])
@pytest.mark.parametrize("path", [ECHO, STREAM])
async def test_a_bomb(path: str, size: int) -> None:
    packed = gzip.compress(bytes(size), 1)
    options = GrpcOptions(port=0, max_input_bytes=len(packed))
    async with serving_calls(options) as calls, connected(calls.port) as client:
        data = message(packed, 1)
        pieces = [data[at : at + 16_384] for at in range(0, len(data), 16_384)]
        ended = await answer(client, request_fields(path, [("grpc-encoding", "gzip")]), *pieces)
        assert ended.status == TOO_LONG
        assert ended.blocks[-1]["grpc-message"].startswith("SERVER: Received message larger than max (more than ")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no gzip", "incorrect header check"),
        (b"", "it has no end"),
        (PACKED[:-6], "it has no end"),
        (PACKED[:-8] + bytes(8), "incorrect data check"),
        (PACKED + b"more", "it goes on behind its end"),
    ],
    ids=["no gzip", "empty", "cut", "wrong sum", "more"],
)
async def test_a_broken_compressed_message(content: bytes, reason: str) -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        ended = await answer(client, request_fields(more=[("grpc-encoding", "gzip")]), message(content, 1))
        assert ended.status == INTERNAL and reason in ended.blocks[-1]["grpc-message"]
        assert (await client.ask(101)).status == 0
