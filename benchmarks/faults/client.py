"""The client of all servers alike: streams of /v1/completions and how they end, probes of /health and of service."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from benchmarks.faults.server import FaultServer

WHOLE, SHORT, ERROR, CUT, HUNG = "whole", "short as if whole", "error event", "connection cut", "hung"
"""Ends of streams. SHORT is the worst: its client cannot know that something is missing."""
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "state")
PATIENCE_S = 60.0
PATH = "/v1/completions"


def completion(server: FaultServer, number: int, max_tokens: int, num_words: int = 24) -> dict[str, Any]:
    """Return the body of a streamed completion whose prompt is made of the number, which is its seed too."""
    prompt = " ".join(random.Random(number).choices(WORDS, k=num_words))
    common = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens}
    return {**common, "temperature": 0.8, "seed": number, "stream": True, **server.adapter.fields}


@asynccontextmanager
async def opened(server: FaultServer, patience_s: float = PATIENCE_S) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client with as many connections as there are requests. Waiting for longer than `patience_s` is a hang."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(patience_s, pool=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=timeout, limits=limits, trust_env=False) as client:
        yield client


@dataclass(slots=True)
class Stream:
    """A client's stream: its events with their times, and its end (None while it runs)."""

    body: dict[str, Any]
    enough: int = 10
    """Events after which it is under way."""
    texts: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    end: str | None = None
    detail: str = ""
    sent_s: float = 0.0
    retry_after: str | None = None
    is_under_way: asyncio.Event = field(default_factory=asyncio.Event)
    _finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.sent_s

    def longest_pause_s(self, since_s: float = 0.0) -> float:
        """Return the longest gap between two events of which the second came after `since_s`."""
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return max((after - before for before, after in pairs if after > since_s), default=0.0)

    async def read(self, client: httpx.AsyncClient) -> None:
        """Read the stream to its end, whatever that is."""
        self.sent_s = time.perf_counter()
        try:
            async with client.stream("POST", PATH, json=self.body) as response:
                await self._read_response(response)
        except httpx.TimeoutException:
            self.end = HUNG
        except httpx.TransportError as error:
            self.end, self.detail = CUT, type(error).__name__
        finally:
            self.is_under_way.set()

    async def _read_response(self, response: httpx.Response) -> None:
        if response.is_error:
            self.detail = (await response.aread()).decode(errors="replace")
            self.end, self.retry_after = f"status {response.status_code}", response.headers.get("retry-after")
            return
        async for line in response.aiter_lines():
            if self.end is None and line.startswith("data: {"):
                self._take(msgspec.json.decode(line.removeprefix("data: ")))
        if self.end is None:
            self.end = WHOLE if self._finish_reason == "length" else SHORT
            self.detail = f"finish reason {self._finish_reason}"

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.end, self.detail = ERROR, msgspec.json.encode(event).decode()
            return
        for choice in event.get("choices", ()):
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            if choice.get("text"):
                self.texts.append(choice["text"])
                self.times_s.append(time.perf_counter())
        if len(self.texts) >= self.enough:
            self.is_under_way.set()


async def read_all(client: httpx.AsyncClient, streams: Sequence[Stream]) -> None:
    """Read all streams at once, each to its end."""
    await asyncio.gather(*(stream.read(client) for stream in streams))


async def serve_once(server: FaultServer, patience_s: float, number: int = 0) -> tuple[str, float]:
    """Send one short request. Returns how it ended and how long that took."""
    stream = Stream(completion(server, 10_000 + number, 4))
    began_s = time.perf_counter()
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s), opened(server, patience_s) as client:
            await stream.read(client)
    return stream.end or HUNG, time.perf_counter() - began_s


async def served_again(server: FaultServer, limit_s: float, every_s: float = 0.25, patience_s: float = 5.0) -> bool:
    """Send short requests until one is answered. Returns whether one was, within the limit."""
    deadline_s, number = time.perf_counter() + limit_s, 0
    while time.perf_counter() < deadline_s:
        number += 1
        if (await serve_once(server, patience_s, number))[0] in (WHOLE, SHORT):
            return True
        await asyncio.sleep(every_s)
    return False


@dataclass(slots=True)
class HealthWatch:
    """Asks /health again and again, and keeps the status, or what happened instead of an answer."""

    server: FaultServer
    timeout_s: float = 2.0
    every_s: float = 0.05
    changes: list[tuple[float, str]] = field(default_factory=list)
    longest_s: float = 0.0

    async def run(self) -> None:
        """Ask until cancelled."""
        async with opened(self.server, self.timeout_s) as client:
            while True:
                asked_s = time.perf_counter()
                state = await self._ask(client)
                self.longest_s = max(self.longest_s, time.perf_counter() - asked_s)
                if not self.changes or self.changes[-1][1] != state:
                    self.changes.append((time.perf_counter(), state))
                await asyncio.sleep(self.every_s)

    async def _ask(self, client: httpx.AsyncClient) -> str:
        try:
            return str((await client.get(self.server.adapter.health)).status_code)
        except httpx.TimeoutException:
            return "no answer"
        except httpx.ConnectError:
            return "refused"
        except httpx.TransportError:
            return "cut"

    def told_after_s(self, since_s: float) -> float | None:
        """Return how long after `since_s` it first said anything but 200; None where it never did."""
        return next((at - since_s for at, state in self.changes if at >= since_s and state != "200"), None)

    def course(self, since_s: float) -> str:
        """Return what it said since then: `200, 503 at 0.1 s, 200 at 0.8 s`."""
        before = [state for at, state in self.changes if at < since_s][-1:]
        after = [f"{state} at {at - since_s:.1f} s" for at, state in self.changes if at >= since_s]
        return ", ".join((*before, *after)) or "nothing"


@asynccontextmanager
async def watching(watch: HealthWatch) -> AsyncIterator[HealthWatch]:
    """Watch /health while the block runs."""
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
