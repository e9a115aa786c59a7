"""Servers with two HTTP workers: how they are started and asked, and what they have counted."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.server_process import MODEL, ServerProcess
from tests.waiting import PATIENCE_S

WORKERS = "--http-workers=2"
PROMPT = {"model": MODEL, "prompt": "Once", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
MAX_TOKENS = 400
BEFORE_LOSS = 5
"""Events that a stream has received when something is lost."""


def fetch_metrics(server: ServerProcess) -> dict[str, float]:
    """The values on the metrics page, by name and labels, which are sorted: their order on the page means nothing."""
    lines = httpx.get(server.metrics_url, timeout=PATIENCE_S).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {_with_sorted_labels(name): float(value) for name, value in pairs}


def _with_sorted_labels(series: str) -> str:
    name, brace, labels = series.partition("{")
    return f"{name}{{{','.join(sorted(labels[:-1].split(',')))}}}" if brace else name


def count(server: ServerProcess, prefix: str) -> float:
    return sum(value for name, value in fetch_metrics(server).items() if name.startswith(prefix))


@dataclass
class Reader:
    """One client of a streamed completion; even numbers are greedy, odd ones sample with a seed."""

    number: int
    texts: list[str] = field(default_factory=list)
    is_under_way: asyncio.Event = field(default_factory=asyncio.Event)
    last_frame: str = ""

    @property
    def body(self) -> dict[str, Any]:
        sampling = {"temperature": 0} if self.number % 2 == 0 else {"temperature": 1.0, "seed": self.number}
        fixed = {"model": "tiny", "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
        return {"prompt": f"Story number {self.number}:", **fixed, **sampling}

    async def read(self, client: httpx.AsyncClient) -> str:
        """The whole text of the answer."""
        async with client.stream("POST", "/v1/completions", json=self.body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                self._take(line)
        assert self.last_frame == "data: [DONE]"
        return "".join(self.texts)

    def _take(self, line: str) -> None:
        if not line or line.startswith(":"):  # a comment keeps the connection while another engine starts
            return
        self.last_frame = line
        if line != "data: [DONE]":
            chunk = json.loads(line.removeprefix("data: "))
            assert "choices" in chunk, chunk
            [choice] = chunk["choices"]
            self.texts.append(choice["text"])
        if len(self.texts) > BEFORE_LOSS or line == "data: [DONE]":  # to a slow reader all may come in fewer
            self.is_under_way.set()


async def read_all(client: httpx.AsyncClient, readers: list[Reader]) -> list[str]:
    return await asyncio.gather(*(reader.read(client) for reader in readers))
