"""CPU time of the gateway's process per server-sent event: Sluice's response class against those of libraries.

    python -m benchmarks.sse [--streams 64] [--events 300] [--rounds 5]

Each round serves every variant once, one after the other. The same loop wakes every stream at each step. CPU time is
that of the serving process; the client is another process. Medians are printed.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from multiprocessing.connection import Connection

import uvloop
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sluice.errors import SluiceError
from sluice.gateway.front.http.errors import openai_error_body
from sluice.gateway.front.http.server import HttpServer
from sluice.gateway.front.http.sse import EventStreamResponse, push_all
from sluice.gateway.front.listeners import listen

JSON = (
    '{"id":"chatcmpl-4f2a9c0b17de4411","object":"chat.completion.chunk","created":1780000000,"model":"rill",'
    '"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}'
)
FRAME = f"data: {JSON}\n\n".encode()
STEP_S = 0.003
"""Seconds between two steps of the loop: longer than all streams take, so that no two events share a write."""

Mailbox = asyncio.Queue[bytes | None]


class Steps:
    """Wakes every open stream at each step, as an engine does."""

    def __init__(self, num_streams: int, num_events: int) -> None:
        self._num_streams = num_streams
        self._num_events = num_events
        self._mailboxes: list[Mailbox] = []
        self._all_open = asyncio.Event()
        self._num_ended = 0
        self._all_ended = asyncio.Event()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of one stream, as whole frames."""
        mailbox: Mailbox = asyncio.Queue()
        self._mailboxes.append(mailbox)
        if len(self._mailboxes) == self._num_streams:
            self._all_open.set()
        while (frame := await mailbox.get()) is not None:
            yield frame
        self._num_ended += 1
        if self._num_ended == self._num_streams:
            self._all_ended.set()

    async def payloads(self) -> AsyncGenerator[str, None]:
        """Yield the events of one stream, for a response that frames them itself."""
        async for _ in self.frames():
            yield JSON

    async def run(self) -> float:
        """Run the steps once every stream is open. Returns the CPU microseconds of this process per event."""
        await self._all_open.wait()
        started = time.process_time()
        for _ in range(self._num_events):
            self._put(FRAME)
            await asyncio.sleep(STEP_S)
        spent = time.process_time() - started
        self._put(None)
        await self._all_ended.wait()
        return spent / (self._num_events * self._num_streams) * 1e6

    def _put(self, frame: bytes | None) -> None:
        for mailbox in self._mailboxes:
            mailbox.put_nowait(frame)


def encode_error(error: SluiceError) -> bytes:
    return b"data: " + openai_error_body(error) + b"\n\n"


VARIANTS: dict[str, Callable[[Steps], Response]] = {
    "ours (front/http/sse.py)": lambda steps: EventStreamResponse(partial(push_all, steps.frames()), encode_error),
    "starlette StreamingResponse": lambda steps: StreamingResponse(steps.frames(), media_type="text/event-stream"),
    "sse-starlette, text": lambda steps: EventSourceResponse(steps.payloads()),
    "sse-starlette, ready bytes": lambda steps: EventSourceResponse(steps.frames()),
}


class Bench:
    """Serves the variants in turn from one HTTP server to one client process."""

    def __init__(self, client: Connection, num_streams: int, num_events: int) -> None:
        self._client = client
        self._num_streams = num_streams
        self._num_events = num_events
        self._respond: Callable[[], Response] | None = None

    async def run(self, rounds: int) -> dict[str, list[float]]:
        listener = listen("127.0.0.1", 0, "--port")
        server = HttpServer(Starlette(routes=[Route("/", self._stream)]), listener)
        server.start()
        self._client.send((listener.getsockname()[1], self._num_streams, rounds * len(VARIANTS)))
        results: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for _ in range(rounds):
            for name in VARIANTS:
                results[name].append(await self._measure(name))
        await server.stop(1.0)
        return results

    async def _measure(self, name: str) -> float:
        steps = Steps(self._num_streams, self._num_events)
        self._respond = lambda: VARIANTS[name](steps)
        self._client.send(name)
        spent = await steps.run()
        num_received = await asyncio.to_thread(self._client.recv)
        expected = self._num_streams * self._num_events
        if num_received != expected:
            raise RuntimeError(f"{name}: {num_received} of {expected} events arrived")
        return spent

    async def _stream(self, request: Request) -> Response:
        assert self._respond is not None
        return self._respond()


def run_client(orders: Connection) -> None:
    """Run the client process: at each order it opens the streams and sends back the number of events."""
    port, num_streams, num_orders = orders.recv()
    for _ in range(num_orders):
        orders.recv()
        orders.send(asyncio.run(count_events(port, num_streams)))


async def count_events(port: int, num_streams: int) -> int:
    return sum(await asyncio.gather(*(count_stream(port) for _ in range(num_streams))))


async def count_stream(port: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n")
    body = await reader.read(-1)
    writer.close()
    return body.count(b"data: {")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--events", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    client = multiprocessing.get_context("spawn").Process(target=run_client, args=(theirs,))
    client.start()
    bench = Bench(ours, arguments.streams, arguments.events)
    results = uvloop.run(bench.run(arguments.rounds))
    client.join()
    sys.stdout.write(f"CPU microseconds of the server per event, {arguments.streams} streams, rounds in brackets\n")
    for name, spent in results.items():
        rounds = " ".join(f"{value:.1f}" for value in spent)
        sys.stdout.write(f"{name:<30} {statistics.median(spent):5.1f}  [{rounds}]\n")


if __name__ == "__main__":
    main()
