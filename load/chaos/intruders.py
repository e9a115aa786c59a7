"""Clients that no server wishes for: slow readers, half-open sockets, senders of garbage."""

import asyncio
import json
import random
from contextlib import suppress

from sluice.bundled import BUNDLED_MODEL
from sluice.load.chaos.fleet import Gateway

_LONG = {"model": BUNDLED_MODEL, "prompt": "Once", "max_tokens": 800, "ignore_eos": True, "temperature": 0}
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SMALL_BUFFER = 4096


async def read_slowly(gateway: Gateway, num_clients: int, seconds: float) -> None:
    """Ask for long streams and read none of them, then leave."""
    body = json.dumps({**_LONG, "stream": True}).encode()
    await asyncio.gather(*(_hold(gateway.port, _request(body), seconds) for _ in range(num_clients)))


async def hold_half_open(gateway: Gateway, num_clients: int, seconds: float) -> None:
    """Open connections on the ports of HTTP and gRPC that say nothing, or stop in the middle of a request."""
    body = json.dumps(_LONG).encode()
    starts = (b"", b"POST /v1/comple", _request(body)[:-20], _HTTP2_PREFACE, _HTTP2_PREFACE + b"\x00\x00\x40\x01\x04")
    ports = (gateway.port, gateway.grpc_port)
    await asyncio.gather(*(_hold(ports[n % 2], starts[n % len(starts)], seconds) for n in range(num_clients)))


async def send_garbage(gateway: Gateway, rng: random.Random, num_clients: int) -> None:
    """Send what is no request to the ports of HTTP and gRPC, and JSON that is no body."""
    pieces = [rng.randbytes(rng.randint(1, 1 << 14)) for _ in range(num_clients)]
    pieces += [_HTTP2_PREFACE + piece for piece in pieces[: num_clients // 2]]
    pieces += [_request(piece) for piece in pieces[: num_clients // 2]]
    pieces += [_request(b'{"prompt": ' + b"[" * 50_000), b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000]
    ports = (gateway.port, gateway.grpc_port)
    await asyncio.gather(*(_hold(port, piece, 1.0) for piece in pieces for port in ports))


def _request(body: bytes) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _hold(port: int, sent: bytes, seconds: float) -> None:
    """Send bytes, read nothing for a time, and drop the connection."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(seconds + 5):
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=_SMALL_BUFFER)
            try:
                writer.write(sent)
                await asyncio.sleep(seconds)
            finally:
                writer.transport.abort()
