"""Clients of a model whose queue refuses who waits too long: `python -m benchmarks.triton.timeouts_client PORT MODEL`.

Prints as JSON how long those waited that were refused, in seconds, and how many were answered. A process of its own,
so that the server's event loop and ours are not one.
"""

import argparse
import asyncio
import json
import re
import sys
from dataclasses import asdict, dataclass, field
from time import perf_counter

import uvloop

_STATUS = re.compile(rb"HTTP/1\.1 (\d+)")
_LENGTH = re.compile(rb"(?i)content-length: *(\d+)")


@dataclass
class Waits:
    """What came back."""

    num_answered: int = 0
    refused_s: list[float] = field(default_factory=list)


async def _client(port: int, request: bytes, deadline: float, waits: Waits) -> None:
    """One request after the other on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while (sent := perf_counter()) < deadline:
            writer.write(request)
            status = await _status(reader)
            if status == 200:
                waits.num_answered += 1
            elif status == 503:
                waits.refused_s.append(perf_counter() - sent)
            else:
                raise RuntimeError(f"the server answered {status}")
    finally:
        writer.close()


async def _status(reader: asyncio.StreamReader) -> int:
    """Of one response, which is read to its end."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, length = _STATUS.match(head), _LENGTH.search(head)
    assert status is not None and length is not None
    await reader.readexactly(int(length[1]))
    return int(status[1])


def _request(model: str, width: int) -> bytes:
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, width], "datatype": "FP32", "data": [0.0] * width}]})
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return (head + body).encode()


async def _load(arguments: argparse.Namespace) -> Waits:
    waits = Waits()
    request, deadline = _request(arguments.model, arguments.width), perf_counter() + arguments.seconds
    await asyncio.gather(*(_client(arguments.port, request, deadline, waits) for _ in range(arguments.clients)))
    return waits


def main(argv: list[str]) -> None:
    """Run, and print what came back."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--width", type=int, default=1)
    print(json.dumps(asdict(uvloop.run(_load(parser.parse_args(argv))))))


if __name__ == "__main__":
    main(sys.argv[1:])
