"""Runs smg in front of workers that answer when they are told to, and says to which of them it sends a request.

Reads a JSON object a line: `choose` with a prompt's text, `first` and `end` when that request gets its first and its
last token. Answers each with a line.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

READY_S = 60.0
MODEL = "m"
CHUNK = b'data: {"id":"1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"x"}]}\n\n'


class Exchange:
    """A request on its way through smg."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.replica: asyncio.Future[int] = loop.create_future()
        self.may_begin, self.may_end = asyncio.Event(), asyncio.Event()
        self.has_begun = asyncio.Event()
        self.reading: asyncio.Task[None] | None = None


class Workers:
    """Workers of the OpenAI protocol on as many ports, which tell one another apart."""

    def __init__(self, count: int) -> None:
        self.sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        self.ports = [each.getsockname()[1] for each in self.sockets]
        self.exchanges: dict[str, Exchange] = {}
        facts = [Route(path, self._tell, methods=["GET"]) for path in ("/health", "/get_server_info", "/server_info")]
        models = [Route(path, self._tell_model, methods=["GET"]) for path in ("/v1/models", "/get_model_info")]
        answer = Route("/v1/completions", self._answer, methods=["POST"])
        self.app = Starlette(routes=[*facts, *models, answer])

    async def _tell(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def _tell_model(self, request: Request) -> JSONResponse:
        model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "sluice"}
        return JSONResponse({"object": "list", "data": [model], "model_path": MODEL, "is_generation": True})

    async def _answer(self, request: Request) -> StreamingResponse:
        number = (await request.json())["user"]
        exchange = self.exchanges[number]
        exchange.replica.set_result(self.ports.index(request.scope["server"][1]))
        return StreamingResponse(self._stream(exchange), media_type="text/event-stream")

    async def _stream(self, exchange: Exchange) -> AsyncIterator[bytes]:
        await exchange.may_begin.wait()
        yield CHUNK
        await exchange.may_end.wait()
        yield b"data: [DONE]\n\n"


async def _choose(client: httpx.AsyncClient, workers: Workers, number: str, text: str) -> int:
    exchange = workers.exchanges[number] = Exchange()
    body = {"model": MODEL, "prompt": text, "max_tokens": 1, "stream": True, "user": number}

    async def read() -> None:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.aiter_bytes():
                exchange.has_begun.set()

    exchange.reading = asyncio.create_task(read())
    await asyncio.wait((exchange.reading, exchange.replica), return_when=asyncio.FIRST_COMPLETED)
    if exchange.reading.done():
        exchange.reading.result()
    return exchange.replica.result()


async def _do(client: httpx.AsyncClient, workers: Workers, job: dict[str, Any]) -> int | None:
    number = str(job["number"])
    if job["job"] == "choose":
        return await _choose(client, workers, number, job["text"])
    exchange = workers.exchanges[number]
    exchange.may_begin.set()
    if job["job"] == "first":
        await exchange.has_begun.wait()
        return None
    exchange.may_end.set()
    assert exchange.reading is not None
    await exchange.reading
    del workers.exchanges[number]
    return None


async def main() -> None:
    """Start workers and smg, then do jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    smg, count = sys.argv[1], int(sys.argv[2])
    workers = Workers(count)
    server = uvicorn.Server(uvicorn.Config(workers.app, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=workers.sockets))
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics_port = free.getsockname()[1], other.getsockname()[1]
    urls = [f"http://127.0.0.1:{each}" for each in workers.ports]
    # A worker that has just started gets a part of the requests for a minute of the clock, which simulated time is not.
    options = ("--policy", "cache_aware", "--worker-warmup-secs", "0", "--prometheus-port", str(metrics_port))
    address = ("--host", "127.0.0.1", "--port", str(port), "--log-level", "warn")
    process = await asyncio.create_subprocess_exec(smg, "launch", "--worker-urls", *urls, *options, *address)
    try:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None, limits=limits) as client:
            await asyncio.wait_for(_await_ready(client, count), READY_S)
            answers.write("true\n")
            while line := await asyncio.to_thread(sys.stdin.readline):
                answers.write(json.dumps(await _do(client, workers, json.loads(line))) + "\n")
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
        server.force_exit = server.should_exit = True
        await serving


async def _await_ready(client: httpx.AsyncClient, count: int) -> None:
    """Wait until smg serves with all workers."""
    while True:
        try:
            found = (await client.get("/workers")).json()
            if sum(1 for each in found["workers"] if each.get("is_healthy", True)) == count:
                return
        except (httpx.TransportError, ValueError):
            pass
        await asyncio.sleep(0.2)


asyncio.run(main())
