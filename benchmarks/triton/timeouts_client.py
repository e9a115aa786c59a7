"""Clients of a model with a queue timeout: `python -m benchmarks.triton.timeouts_client PORT MODEL`.

It prints as JSON the seconds that rejected requests waited, and the number of answered requests. It is a process of its
own, so that it does not share an event loop with the server.
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
class Outcomes:
    """The outcomes of the requests: answers, and the seconds until each rejection."""

    num_answered: int = 0
    rejected_s: list[float] = field(default_factory=list)


async def _client(port: int, request: bytes, deadline: float, outcomes: Outcomes) -> None:
    """Send one request after the other on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while (sent := perf_counter()) < deadline:
            writer.write(request)
            status = await _status(reader)
            if status == 200:
                outcomes.num_answered += 1
            elif status == 503:
                outcomes.rejected_s.append(perf_counter() - sent)
            else:
                raise RuntimeError(f"the server answered {status}")
    finally:
        writer.close()


async def _status(reader: asyncio.StreamReader) -> int:
    """Read one response to its end. Returns its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, length = _STATUS.match(head), _LENGTH.search(head)
    assert status is not None and length is not None
    await reader.readexactly(int(length[1]))
    return int(status[1])


def _request(model: str, width: int) -> bytes:
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, width], "datatype": "FP32", "data": [0.0] * width}]})
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return (head + body).encode()


async def _load(arguments: argparse.Namespace) -> Outcomes:
    outcomes = Outcomes()
    request, deadline = _request(arguments.model, arguments.width), perf_counter() + arguments.seconds
    await asyncio.gather(*(_client(arguments.port, request, deadline, outcomes) for _ in range(arguments.clients)))
    return outcomes


def main(argv: list[str]) -> None:
    """Run the clients and print the outcomes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--width", type=int, default=1)
    print(json.dumps(asdict(uvloop.run(_load(parser.parse_args(argv))))))


if __name__ == "__main__":
    main(sys.argv[1:])
