"""Recovery from a killed engine: `kill -9` under 32 streams, the pauses of the streams, and their answers."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.figures import BenchmarkError, Figure, Target
from benchmarks.server import Server, running_server
from sluice.gateway.checkpoint import find_checkpoint, model_name

NUM_STREAMS = 32
PROMPT_TOKENS = 64
MAX_TOKENS = 256
BEFORE_KILL = 32
"""Token events of each stream after which the engine is killed."""
TIMEOUT_S = 120.0
PROBE_S = 0.005

UNITS_AND_TARGETS = {
    "kill to ready again": ("s", None),
    "kill to first resumed token": ("s", None),
    "longest pause of a stream": ("s", None),
    "longest pause without a kill": ("s", None),
    "same greedy answers": (f"of {NUM_STREAMS // 2}", Target(NUM_STREAMS // 2, is_ceiling=False)),
    "same sampled answers": (f"of {NUM_STREAMS // 2}", Target(NUM_STREAMS // 2, is_ceiling=False)),
}


def measure(num_repeats: int, folder: Path, bundled: Path | None) -> list[Figure]:
    """Measure the bundled model (or the checkpoint `bundled` in its place), each repeat on a server of its own."""
    checkpoint = bundled or find_checkpoint(None)
    name = model_name(checkpoint)
    samples: dict[str, list[float]] = defaultdict(list)
    for repeat in range(num_repeats):
        with running_server(checkpoint, folder / f"recovery-{repeat}.log") as server:
            for figure, value in asyncio.run(_measure_server(server, name)):
                samples[figure].append(value)
    return [Figure(figure, name, unit, tuple(samples[figure]), t) for figure, (unit, t) in UNITS_AND_TARGETS.items()]


@dataclass(slots=True)
class Stream:
    """A client's stream. Even numbers are greedy, odd ones sample with a seed."""

    number: int
    model: str
    texts: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    is_under_way: asyncio.Event = field(default_factory=asyncio.Event)

    def body(self) -> dict[str, Any]:
        prompt = random.Random(self.number).choices(range(100, 4000), k=PROMPT_TOKENS)
        sampling = {"temperature": 0} if self.number % 2 == 0 else {"temperature": 0.8, "seed": self.number}
        fixed = {"model": self.model, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
        return {"prompt": prompt, **fixed, **sampling}

    async def read(self, client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/v1/completions", json=self.body()) as response:
            if response.is_error:
                raise BenchmarkError(f"stream {self.number} was refused: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._take(msgspec.json.decode(line.removeprefix("data: ")))

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise BenchmarkError(f"stream {self.number} ended in an error: {event['error']['message']}")
        self.texts.append(event["choices"][0]["text"])
        self.times_s.append(time.perf_counter())
        if len(self.texts) >= BEFORE_KILL:
            self.is_under_way.set()

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def pauses(self) -> list[tuple[float, float]]:
        """(length, end) of each gap between two events, in seconds."""
        return [(end - begin, end) for begin, end in pairwise(self.times_s)]


async def _measure_server(server: Server, model: str) -> Iterator[tuple[str, float]]:
    limits = httpx.Limits(max_connections=NUM_STREAMS + 1)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, limits=limits) as client:
        undisturbed = [Stream(number, model) for number in range(NUM_STREAMS)]
        await read_all(client, undisturbed)
        streams = [Stream(number, model) for number in range(NUM_STREAMS)]
        reading = asyncio.create_task(read_all(client, streams))
        await asyncio.gather(*(stream.is_under_way.wait() for stream in streams))
        killed_s = time.perf_counter()
        [engine] = server.gateway.children()
        engine.kill()
        ready_s = await _ready_again(client)
        await reading
    return figures(undisturbed, streams, killed_s, ready_s)


async def read_all(client: httpx.AsyncClient, streams: Sequence[Stream]) -> None:
    """Read all streams at once, each to its end."""
    await asyncio.gather(*(stream.read(client) for stream in streams))


async def _ready_again(client: httpx.AsyncClient) -> float:
    """Wait until the server is not ready and then ready again. Returns that time."""
    was_ready, is_ready = True, True
    while was_ready or not is_ready:
        await asyncio.sleep(PROBE_S)
        was_ready, is_ready = is_ready and was_ready, (await client.get("/v2/health/ready")).is_success
    return time.perf_counter()


def figures(
    undisturbed: list[Stream], streams: list[Stream], killed_s: float, ready_s: float
) -> Iterator[tuple[str, float]]:
    yield "kill to ready again", ready_s - killed_s
    yield "kill to first resumed token", min(max(stream.pauses)[1] for stream in streams) - killed_s
    yield "longest pause of a stream", max(max(stream.pauses)[0] for stream in streams)
    yield "longest pause without a kill", max(max(stream.pauses)[0] for stream in undisturbed)
    same = [before.text == now.text for before, now in zip(undisturbed, streams, strict=True)]
    yield "same greedy answers", sum(same[0::2])
    yield "same sampled answers", sum(same[1::2])
