"""The RAG pipeline as one request, compared with a client that calls its steps over HTTP."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import uvloop

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.server import running_server
from sluice.load.connection import ConnectionPool, ResponseReceiver, encode_request

NUM_QUESTIONS = 48
NUM_CLIENTS = (1, 8)
MAX_TOKENS = 16
QUESTIONS = (
    "What does max_queue_delay_microseconds do?",
    "How are connections of a client that left noticed?",
    "Which policy never evicts a sequence?",
    "How is the size of the KV cache chosen?",
    "What happens when the engine dies?",
    "Which backends are there?",
    "How do I limit the time of a request?",
    "Where do the metrics stand?",
)
DOCUMENTATION_WAIT_S = 120.0

Ask = Callable[[ConnectionPool, str], Awaitable[float]]
"""Answers one question. Returns the time of the first token, by the pool's clock."""


@dataclass(slots=True)
class _Body(ResponseReceiver):
    """Receives a response, and records when its first piece with `mark` arrives."""

    now: Callable[[], float]
    mark: bytes = b""
    status: int = 0
    pieces: list[bytes] = field(default_factory=list)
    marked_at: float = 0.0

    def on_status(self, status: int) -> None:
        self.status = status

    def on_body(self, piece: bytes, at: float) -> None:
        self.pieces.append(piece)
        if not self.marked_at and self.mark in piece:
            self.marked_at = at

    @property
    def text(self) -> bytes:
        return b"".join(self.pieces)


async def _post(pool: ConnectionPool, path: str, body: dict[str, Any], mark: bytes = b"") -> _Body:
    received = _Body(pool.now, mark)
    connection = await pool.acquire()
    try:
        await connection.exchange(encode_request("POST", pool.url, path, (), orjson.dumps(body)), received)
    finally:
        pool.release(connection)
    if received.status != 200:
        raise BenchmarkError(f"{path} answered {received.status}: {received.text[:300]!r}")
    return received


async def ask_pipeline(pool: ConnectionPool, question: str) -> float:
    """Ask the pipeline in one request."""
    body = {"query": question, "collection": "sluice", "max_tokens": MAX_TOKENS}
    received = await _post(pool, "/v2/models/rag_pipeline/generate_stream", body, b'"response"')
    return received.marked_at


async def ask_steps(pool: ConnectionPool, question: str) -> float:
    """Call the same models one by one, and carry the tensors from each to the next."""
    embeddings = await _infer(pool, "query_encoder", {"text": [question]})
    found = await _infer(
        pool, "retriever", {"query": [question], "query_embeddings": embeddings["embeddings"]}, collection="sluice"
    )
    prompt = await _infer(
        pool,
        "rag_prompt",
        {"query": [question], "context": found["context"], "sources": found["sources"]},
        max_tokens=MAX_TOKENS,
    )
    body = {"messages": prompt["messages"][0], "max_tokens": MAX_TOKENS}
    received = await _post(pool, "/v2/models/rill/generate_stream", body, b'"text_output"')
    return received.marked_at


async def _infer(pool: ConnectionPool, model: str, inputs: dict[str, list[Any]], **parameters: Any) -> dict[str, Any]:
    """Return the outputs by name. Every model here batches: the first dimension is one row."""
    tensors = [
        {
            "name": name,
            "shape": [1, len(elements)],
            "datatype": "BYTES" if isinstance(elements[0], str) else "FP32",
            "data": elements,
        }
        for name, elements in inputs.items()
    ]
    received = await _post(pool, f"/v2/models/{model}/infer", {"inputs": tensors, "parameters": parameters})
    return {output["name"]: output["data"] for output in orjson.loads(received.text)["outputs"]}


@dataclass(frozen=True, slots=True)
class _Round:
    """Questions per second, and the median time to first token."""

    rate: float
    ttft_ms: float


async def _round(url: str, ask: Ask, num_clients: int) -> _Round:
    pool = ConnectionPool(url, time.perf_counter)
    waiting = iter([QUESTIONS[number % len(QUESTIONS)] for number in range(NUM_QUESTIONS)])
    ttfts: list[float] = []

    async def client() -> None:
        for question in waiting:
            started = pool.now()
            ttfts.append((await ask(pool, question)) - started)

    started = pool.now()
    await asyncio.gather(*(client() for _ in range(num_clients)))
    elapsed = pool.now() - started
    pool.close()
    return _Round(NUM_QUESTIONS / elapsed, statistics.median(ttfts) * 1000)


async def _await_documentation(url: str) -> None:
    """Wait until a fresh server has ingested its documentation, which it does once it is ready."""
    pool, deadline = ConnectionPool(url, time.perf_counter), time.perf_counter() + DOCUMENTATION_WAIT_S
    previous = -1
    while time.perf_counter() < deadline:
        received = _Body(pool.now)
        connection = await pool.acquire()
        await connection.exchange(encode_request("GET", url, "/v1/rag/collections", ()), received)
        pool.release(connection)
        listed = [each for each in orjson.loads(received.text)["data"] if each["name"] == "sluice"]
        current = listed[0]["num_chunks"] if listed else 0
        if current and current == previous:
            pool.close()
            return
        previous = current
        await asyncio.sleep(3.0)
    raise BenchmarkError("the server's documentation was not read in time")


def measure(repeats: int, out: Path, report: ReportProgress) -> list[Figure]:
    """Measure rate and time to first token of both ways in turns. The pipeline's must be better."""
    folder = out.resolve() / "rag"
    with running_server(None, folder / "serve.log", "--rag-store", str(folder / "sluice.sqlite")) as server:
        uvloop.run(_await_documentation(server.url))
        rounds = uvloop.run(_rounds(server.url, repeats, report))
    return [figure for num_clients in NUM_CLIENTS for figure in _figures(num_clients, rounds[num_clients])]


async def _rounds(url: str, repeats: int, report: ReportProgress) -> dict[int, list[tuple[_Round, _Round]]]:
    await _round(url, ask_pipeline, 1)
    await _round(url, ask_steps, 1)
    rounds: dict[int, list[tuple[_Round, _Round]]] = {}
    for num_clients in NUM_CLIENTS:
        report(f"{num_clients} clients")
        rounds[num_clients] = [
            (await _round(url, ask_pipeline, num_clients), await _round(url, ask_steps, num_clients))
            for _ in range(repeats)
        ]
    return rounds


def _figures(num_clients: int, rounds: Sequence[tuple[_Round, _Round]]) -> list[Figure]:
    clients = f"{num_clients} clients"
    return [
        Figure("questions/s", f"pipeline, {clients}", "1/s", tuple(whole.rate for whole, _ in rounds)),
        Figure("questions/s", f"steps by hand, {clients}", "1/s", tuple(steps.rate for _, steps in rounds)),
        Figure("TTFT", f"pipeline, {clients}", "ms", tuple(whole.ttft_ms for whole, _ in rounds)),
        Figure("TTFT", f"steps by hand, {clients}", "ms", tuple(steps.ttft_ms for _, steps in rounds)),
        Figure(
            "TTFT, pipeline / by hand",
            clients,
            "x",
            tuple(whole.ttft_ms / steps.ttft_ms for whole, steps in rounds),
            Target(1.0),
        ),
    ]
