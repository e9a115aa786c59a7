"""Recovery from a crash: a real server, 32 streams, and `kill -9` of its engine."""

import asyncio
import json
import re
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest

from tests.server_process import ServerProcess, StartServer
from tests.waiting import PATIENCE_S

NUM_STREAMS = 32
NUM_RUNNING = 8
"""Streams that the engine runs at once: the others still wait when it is killed, also where readers are slow."""
MAX_TOKENS = 400
BEFORE_KILL = 5
"""Events that a stream has received when the engine is killed."""


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
        if len(self.texts) > BEFORE_KILL or line == "data: [DONE]":  # to a slow reader all may come in fewer
            self.is_under_way.set()


async def read_all(client: httpx.AsyncClient, readers: list[Reader]) -> list[str]:
    return await asyncio.gather(*(reader.read(client) for reader in readers))


async def probe(client: httpx.AsyncClient, path: str) -> bool:
    return (await client.get(path)).status_code == 200


async def kill_and_watch(server: ServerProcess, client: httpx.AsyncClient) -> None:
    """Kill the engine; readiness goes and comes back, liveness stays."""
    engine = server.engine()
    engine.kill()
    while await probe(client, "/v2/health/ready"):
        assert await probe(client, "/v2/health/live")
        await asyncio.sleep(0.01)
    while not await probe(client, "/v2/health/ready"):
        assert await probe(client, "/v2/health/live")
        await asyncio.sleep(0.01)
    assert not psutil.pid_exists(engine.pid)


@pytest.mark.long
async def test_32_streams_bring_the_same_text_when_their_engine_is_killed(start_server: StartServer) -> None:
    server = await asyncio.to_thread(start_server, "--dtype=f32", f"--max-num-seqs={NUM_RUNNING}")
    limits = httpx.Limits(max_connections=NUM_STREAMS + 1)
    async with httpx.AsyncClient(base_url=server.base_url, timeout=4 * PATIENCE_S, limits=limits) as client:
        undisturbed = await read_all(client, [Reader(number) for number in range(NUM_STREAMS)])
        readers = [Reader(number) for number in range(NUM_STREAMS)]
        reading = asyncio.create_task(read_all(client, readers))
        begun = [asyncio.create_task(reader.is_under_way.wait()) for reader in readers]
        await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
        assert not reading.done()
        await kill_and_watch(server, client)
        texts = await reading
    assert texts == undisturbed
    assert len({*texts}) == NUM_STREAMS
    waiting = re.search(r"starting another, (\d+) requests wait for it", server.log)
    assert waiting, server.log
    assert 0 < int(waiting[1]) <= NUM_STREAMS  # on a busy machine some have ended before the kill
