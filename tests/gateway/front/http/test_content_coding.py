"""Bodies of requests that come compressed, or with a byte order mark."""

import asyncio
import gzip
import json
import random
import tracemalloc
import zlib
from collections.abc import AsyncGenerator, Callable
from secrets import token_hex
from typing import Any

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.front.http.content_coding import unpack_pieces
from sluice.gateway.options.http import HttpOptions
from tests.gateway.front.http.live import MODEL, LiveServer

MESSAGES = [{"role": "user", "content": "Hi"}]
PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP": gzip.compress,
    "deflate": zlib.compress,
    "identity": bytes,
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"model": MODEL, "prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"model": MODEL, "input": "Hi", "max_output_tokens": 16},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": MESSAGES},
    "/api/chat": {"model": MODEL, "messages": MESSAGES, "options": {"num_predict": 2}},
    "/api/generate": {"model": MODEL, "prompt": "Hi", "options": {"num_predict": 2}},
    "/tokenize": {"model": MODEL, "prompt": "Hi"},
}
CHAT = "/v1/chat/completions"
BOM = b"\xef\xbb\xbf"
LIMIT_BYTES = 4096
"""What `strict_live` allows."""


@pytest.mark.parametrize("path", BODIES)
def test_every_route_reads_compressed_bodies_and_byte_order_marks(live: LiveServer, path: str) -> None:
    body = json.dumps(BODIES[path]).encode()
    for encoding in PACKINGS if path == CHAT else ("gzip", "deflate"):
        packed = PACKINGS[encoding](body)
        assert live.post(path, packed, headers={"content-encoding": encoding}).status_code == 200
    for more in (b"", b" " * 400_000):
        assert live.post(path, BOM + body + more).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat", "/v1/files"])
def test_another_encoding_is_refused_with_those_that_are_read(live: LiveServer, path: str) -> None:
    for encoding in ("zstd", "br", "compress", "gzip, deflate", "gzip, gzip"):
        answer = live.post(path, b"\x28\xb5\x2f\xfd", headers={"content-encoding": encoding})
        assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip, deflate")
        assert f"content-encoding must be gzip, deflate or identity, got '{encoding}'" in answer.text
    if path == CHAT:
        error = answer.json()["error"]
        assert (error["param"], error["type"]) == ("content-encoding", "invalid_request_error")


PACKED = gzip.compress(json.dumps(BODIES[CHAT]).encode())
BROKEN = {
    "no gzip": (json.dumps(BODIES[CHAT]).encode(), "incorrect header check"),
    "nothing": (b"", "its end is missing"),
    "cut": (PACKED[:-1], "its end is missing"),
    "a wrong sum": (PACKED[:-8] + bytes(8), "incorrect data check"),
    "more behind it": (PACKED + b"more", "incorrect header check"),
    "too many parts": (PACKED + gzip.compress(b"") * 1024, "it has more than 1024 parts"),
}


@pytest.mark.parametrize(("body", "problem"), BROKEN.values(), ids=BROKEN)
def test_a_body_that_is_not_encoded_as_it_says_is_refused(live: LiveServer, body: bytes, problem: str) -> None:
    answer = live.post(CHAT, body, headers={"content-encoding": "gzip"})
    assert answer.status_code == 400
    assert f"the request's body cannot be decompressed: {problem}" in answer.json()["error"]["message"]


def test_a_body_may_be_several_gzip_files(live: LiveServer) -> None:
    body = json.dumps(BODIES[CHAT]).encode()
    packed = b"".join(gzip.compress(body[start : start + 10]) for start in range(0, len(body), 10))
    assert live.post(CHAT, packed, headers={"content-encoding": "gzip"}).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_a_bomb_is_too_large(strict_live: LiveServer, path: str) -> None:
    bomb = gzip.compress(bytes(1 << 20))
    assert len(bomb) < LIMIT_BYTES
    assert strict_live.post(path, bomb, headers={"content-encoding": "gzip"}).status_code == 413


async def _in_pieces(data: bytes, size: int) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def test_a_bomb_takes_no_memory() -> None:
    bomb = gzip.compress(bytes(24 << 20), 9)

    async def count() -> int:
        num_bytes = 0
        async for piece in unpack_pieces(_in_pieces(bomb, 64 << 10), 16 << 20):
            num_bytes += len(piece)
        return num_bytes

    tracemalloc.start()
    try:
        with pytest.raises(SluiceError) as refused:
            asyncio.run(count())
        assert refused.value.code is ErrorCode.TOO_LARGE
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
def test_what_is_unpacked_does_not_depend_on_the_pieces(size: int) -> None:
    text = random.Random(1).randbytes(2000) + bytes(1 << 20) + b"end"
    packed = gzip.compress(text[:1000]) + gzip.compress(text[1000:])

    async def collect() -> bytes:
        return b"".join([piece async for piece in unpack_pieces(_in_pieces(packed, size), len(text))])

    assert asyncio.run(collect()) == text


def test_a_long_compressed_body_is_read(live: LiveServer) -> None:
    packed = gzip.compress(json.dumps(BODIES[CHAT]).encode().ljust(3 << 20))
    assert live.post(CHAT, packed, headers={"content-encoding": "gzip"}).status_code == 200


def test_an_idempotent_request_may_be_compressed(live: LiveServer) -> None:
    packed = gzip.compress(json.dumps(BODIES[CHAT]).encode())
    headers = {"content-encoding": "gzip", "idempotency-key": token_hex(8)}
    first, second = (live.post(CHAT, packed, headers=headers) for _ in range(2))
    assert first.status_code == 200 and first.content == second.content
    assert second.headers["idempotent-replayed"] == "true"


def test_an_uploaded_file_may_be_compressed(live: LiveServer) -> None:
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "rill", "prompt": "a"}}\n'
    request = live.client.build_request("POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("a", line)})
    headers = {"content-type": request.headers["content-type"], "content-encoding": "gzip"}
    answer = live.post("/v1/files", gzip.compress(request.read()), headers=headers)
    assert answer.status_code == 200 and answer.json()["bytes"] == len(line)


def test_the_largest_body_counts_as_it_is_unpacked(strict_live: LiveServer) -> None:
    body = json.dumps(BODIES[CHAT]).encode()
    assert HttpOptions().max_input_bytes > LIMIT_BYTES
    for size, status in ((LIMIT_BYTES, 200), (LIMIT_BYTES + 1, 413)):
        packed = gzip.compress(body.ljust(size))
        assert strict_live.post(CHAT, packed, headers={"content-encoding": "gzip"}).status_code == status
