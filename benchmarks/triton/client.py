"""A load generator for one kind of request: `python -m benchmarks.triton.client KIND PORT ...` prints counts as JSON.

It is a process of its own, so that it does not share an event loop with a server.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import uvloop

from benchmarks.triton.repository import TOKENS, WIDTH

STALL_S = 20.0
"""Seconds without an event after which a stream counts as stalled."""


@dataclass
class ClientCounts:
    """Counts of the responses. `num_short` streams ended early or with an error."""

    num_requests: int = 0
    num_events: int = 0
    num_short: int = 0
    num_stalled: int = 0
    seconds: float = 0.0


SendMore = Callable[[], bool]
"""Returns whether another request is to be sent."""


def _infer_request(model: str, width: int) -> Any:
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=model)
    name = "INPUT0" if model == "identity" else "x"
    request.inputs.add(name=name, datatype="FP32", shape=[1, width])
    request.raw_input_contents.append(np.arange(width, dtype=np.float32).tobytes())
    return request


async def _grpc_unary(port: int, counts: ClientCounts, send_more: SendMore, model: str, width: int) -> None:
    import grpc
    from tritonclient.grpc import service_pb2_grpc

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub, request = service_pb2_grpc.GRPCInferenceServiceStub(channel), _infer_request(model, width)
        while send_more():
            await stub.ModelInfer(request)
            counts.num_requests += 1
            counts.num_events += 1


async def _grpc_stream(port: int, counts: ClientCounts, send_more: SendMore, model: str, width: int) -> None:
    """Send one request after the other on one stream, each after the response to the last."""
    import grpc
    from tritonclient.grpc import service_pb2_grpc

    request = _infer_request(model, width)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        while send_more():
            await call.write(request)
            response = await call.read()
            counts.num_requests += 1
            counts.num_events += 1
            counts.num_short += bool(response.error_message)
        with suppress(grpc.aio.AioRpcError):  # tritonserver may crash here, after all responses
            await call.done_writing()
            await call.read()


async def _generate_stream(port: int, counts: ClientCounts, send_more: SendMore, model: str, width: int) -> None:
    """Request streams of TOKENS events, one after the other on one connection."""
    body = json.dumps({"count": TOKENS}).encode()
    head = f"POST /v2/models/repeat/generate_stream HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    while send_more():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while send_more():
                writer.write(head.encode() + body)
                num_events = await _count_events(reader)
                counts.num_requests += 1
                counts.num_events += num_events
                counts.num_short += num_events != TOKENS
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            counts.num_requests += 1
            counts.num_stalled += 1
        finally:
            writer.close()


async def _count_events(reader: asyncio.StreamReader) -> int:
    """Count the events of one chunked response."""
    count, tail = 0, b""
    async for piece in _pieces(reader):
        count += (tail + piece).count(b"\ndata: ") - tail.count(b"\ndata: ")
        tail = (tail + piece)[-8:]
        if tail.endswith(b"\r\n0\r\n\r\n"):
            return count
    raise asyncio.IncompleteReadError(b"", None)


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        async with asyncio.timeout(STALL_S):
            piece = await reader.read(65536)
        if not piece:
            return
        yield piece


_KINDS: dict[str, Callable[[int, ClientCounts, SendMore, str, int], Coroutine[Any, Any, None]]] = {
    "grpc": _grpc_unary,
    "grpc-stream": _grpc_stream,
    "generate-stream": _generate_stream,
}


async def _load(arguments: argparse.Namespace) -> ClientCounts:
    counts = ClientCounts()
    work = _KINDS[arguments.kind]
    started = time.perf_counter()
    deadline = started + arguments.seconds if arguments.seconds else None
    limit = arguments.requests
    num_sent = 0

    def send_more() -> bool:
        nonlocal num_sent
        if (deadline and time.perf_counter() > deadline) or (limit and num_sent >= limit):
            return False
        num_sent += 1
        return True

    clients = (
        work(arguments.port, counts, send_more, arguments.model, arguments.width) for _ in range(arguments.clients)
    )
    await asyncio.gather(*clients)
    counts.seconds = time.perf_counter() - started
    return counts


def main(argv: list[str]) -> None:
    """Run the load and print the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=_KINDS)
    parser.add_argument("port", type=int)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--model", default="identity")
    parser.add_argument("--width", type=int, default=WIDTH)
    counts = uvloop.run(_load(parser.parse_args(argv)))
    print(json.dumps(asdict(counts)))


if __name__ == "__main__":
    main(sys.argv[1:])
