"""The speed of ingestion over HTTP, and how long others wait meanwhile: a stream of the bundled LLM, and /health."""

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path

import httpx
import uvloop

from benchmarks.figures import Figure, ReportProgress, Target
from benchmarks.server import running_server
from sluice.gateway.bundled import documentation

COLLECTION = "pages"
_TARGET_RATE = 300.0
_ALONE_S = 5.0
_SETTLE_S = 5.0
"""Time in which the server stores its own documentation."""
_HEALTH_INTERVAL_S = 0.01
_MAX_TOKENS = 400


class Watch:
    """Notes the gaps of a stream and the latencies of /health until it is stopped. In seconds."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.gaps: list[float] = []
        self.latencies: list[float] = []

    async def stream(self) -> None:
        body = {"model": "rill", "prompt": "The server", "max_tokens": _MAX_TOKENS, "ignore_eos": True, "stream": True}
        while True:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                before_s: float | None = None
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now_s = time.perf_counter()
                    if before_s is not None:
                        self.gaps.append(now_s - before_s)
                    before_s = now_s

    async def health(self) -> None:
        while True:
            began_s = time.perf_counter()
            (await self._client.get("/health")).raise_for_status()
            self.latencies.append(time.perf_counter() - began_s)
            await asyncio.sleep(_HEALTH_INTERVAL_S)

    def figures(self, name: str) -> list[Figure]:
        both = (("gap of a stream", sorted(self.gaps)), ("/health", sorted(self.latencies)))
        return [
            Figure(f"{what}, {label}", name, "ms", (1000 * samples[place],))
            for what, samples in both
            for label, place in (("p99", len(samples) * 99 // 100), ("worst", -1))
        ]


def measure(repeats: int, out: Path, report: ReportProgress) -> list[Figure]:
    """Measure chunks/s of the documentation's pages, and what others see alone and during the ingestion."""
    return uvloop.run(_measure(repeats, out.resolve(), report))


async def _measure(repeats: int, out: Path, report: ReportProgress) -> list[Figure]:
    with running_server(None, out / "rag" / "ingestion.log", "--rag-store", ":memory:") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            await asyncio.sleep(_SETTLE_S)
            rates = [await _ingest(client, number, report) for number in range(repeats)]
            alone, beside = Watch(client), Watch(client)
            await _beside(alone, asyncio.sleep(_ALONE_S))
            await _beside(beside, _ingest(client, repeats, report))
    rate = Figure("ingestion", "documentation", "chunks/s", tuple(rates), Target(_TARGET_RATE, is_ceiling=False))
    return [rate, *alone.figures("alone"), *beside.figures("beside ingestion")]


async def _beside(watch: Watch, work: Coroutine[object, object, object]) -> None:
    tasks = [asyncio.create_task(watch.stream()), asyncio.create_task(watch.health())]
    try:
        await work
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ingest(client: httpx.AsyncClient, number: int, report: ReportProgress) -> float:
    """Add all pages to a new collection. Returns chunks/s."""
    pages = [{"id": name, "text": path.read_text(), "format": "markdown"} for name, path in documentation().items()]
    began_s = time.perf_counter()
    answer = await client.post(f"/v1/rag/{COLLECTION}{number}/documents", json={"documents": pages})
    seconds = time.perf_counter() - began_s
    num_chunks = sum(int(each["num_chunks"]) for each in answer.raise_for_status().json()["data"])
    report(f"{num_chunks} chunks in {seconds:.1f} s")
    return num_chunks / seconds
