"""Streams whose connections are cut: that nothing is lost or comes twice, what that costs, and a killed gateway.

Every stream is read over connections that are cut at random bytes, and its text compared with that of a stream that
nobody cut. Two gateways share a Redis; one is killed with half of the streams under way.
"""

import asyncio
import json
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit

from redis import Redis

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.server import Server, running_server
from benchmarks.streaming.cutting import Cuts, CutStream
from sluice.gateway.checkpoint import find_checkpoint, model_name

PATH = "/v1/completions"
NUM_STREAMS = 10_000
NUM_OPEN = 200
"""Streams that are read at a time."""
NUM_TEXTS = 20
"""Different requests, each of which many streams send."""
MAX_TOKENS = 48
MOST_CUTS = 4
MOST_BYTES = 12_000
"""Most bytes of a connection that is cut: a whole answer has some 14,000."""
RESUME_S = 20
EXACT = "--dtype=f32"
"""In bf16 what else is in a batch changes some answers."""
PATIENCE_S = 500.0
_PERIOD_S = 0.5
_NONE = Target(0)


@dataclass(slots=True)
class Seen:
    """Counts what the clients of one run have seen."""

    streams: int = 0
    connections: int = 0
    differing: int = 0
    peak_mb: float = 0.0
    seconds: float = 0.0
    longest_pause_s: float = 0.0
    texts: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.connections} connections for {self.streams} streams in {self.seconds:.0f} s: {self.differing} "
            f"differ, longest pause {self.longest_pause_s:.1f} s, gateway {self.peak_mb:.0f} MB"
        )


def measure(folder: Path, report: ReportProgress, num_streams: int = NUM_STREAMS) -> list[Figure]:
    """Cut `num_streams` streams at one gateway, and as many at two, one of which is killed."""
    figures = _measure_one(folder, report, num_streams)
    if shutil.which("redis-server") is None:
        report("no redis-server in PATH: two gateways are not measured")
        return figures
    return figures + _measure_two(folder, report, num_streams) + _measure_cost(folder, report)


def _measure_one(folder: Path, report: ReportProgress, num_streams: int) -> list[Figure]:
    checkpoint = find_checkpoint(None)
    with running_server(checkpoint, folder / "resumption.log", f"--stream-resume-secs={RESUME_S}", EXACT) as server:
        seen = asyncio.run(read_all([server], model_name(checkpoint), num_streams))
    report(str(seen))
    return _figures("one gateway", seen)


def _measure_two(folder: Path, report: ReportProgress, num_streams: int) -> list[Figure]:
    checkpoint = find_checkpoint(None)
    with ExitStack() as stack:
        url = stack.enter_context(running_redis(folder))
        options = (f"--stream-resume-secs={RESUME_S}", f"--stream-store={url}", EXACT)
        first, second = (
            stack.enter_context(running_server(checkpoint, folder / f"resumption-{name}.log", *options))
            for name in "ab"
        )
        seen = asyncio.run(read_all([first, second], model_name(checkpoint), num_streams, kill=first))
        log = (folder / "resumption-b.log").read_text()
        redis_mb = Redis.from_url(url).info("memory")["used_memory_peak"] / 1e6
    num_taken = log.count("goes on here")
    report(f"{seen}, {num_taken} taken over, {redis_mb:.0f} MB in Redis")
    subject = "two gateways, one killed"
    taken = Figure("streams taken over", subject, "", (float(num_taken),))
    return [*_figures(subject, seen), taken, Figure("peak memory of Redis", subject, "MB", (redis_mb,))]


def _figures(subject: str, seen: Seen) -> list[Figure]:
    return [
        Figure("streams", subject, "", (float(seen.streams),)),
        Figure("connections", subject, "", (float(seen.connections),)),
        Figure("streams that differ", subject, "", (float(seen.differing),), _NONE),
        Figure("longest pause of a stream", subject, "s", (seen.longest_pause_s,)),
        Figure("peak memory of the gateway", subject, "MB", (seen.peak_mb,)),
    ]


async def read_all(
    servers: Sequence[Server], model: str, num_streams: int, *, num_open: int = NUM_OPEN, kill: Server | None = None
) -> Seen:
    """Read the streams over cut connections; half way one server is killed, where `kill` says so.

    Raises BenchmarkError for an event that is lost or comes twice.
    """
    seen, begun_at = Seen(), time.perf_counter()
    for number in range(NUM_TEXTS):
        whole = CutStream([_address(servers[-1])], PATH, _body(model, number), Cuts(random.Random(0), 0, 0))
        seen.texts[number] = text_of(await whole.read(PATIENCE_S))
    places, tasks = asyncio.Semaphore(num_open), []
    watching = asyncio.create_task(_watch(servers[-1], seen))
    for number in range(num_streams):
        await places.acquire()
        if kill is not None and number == num_streams // 2:
            kill.gateway.kill()
        task = asyncio.create_task(_read_one([_address(each) for each in servers], model, number, seen))
        task.add_done_callback(lambda _: places.release())
        tasks.append(task)
    await asyncio.gather(*tasks)
    watching.cancel()
    seen.seconds = time.perf_counter() - begun_at
    return seen


async def _read_one(addresses: list[tuple[str, int]], model: str, number: int, seen: Seen) -> None:
    chance = random.Random(number)
    cuts = Cuts(chance, chance.randint(1, MOST_CUTS), MOST_BYTES)
    addresses = addresses[number % len(addresses) :] + addresses[: number % len(addresses)]
    stream = CutStream(addresses, PATH, _body(model, number % NUM_TEXTS), cuts, token_hex(8))
    text = text_of(await stream.read(PATIENCE_S))
    seen.streams += 1
    seen.connections += stream.num_connections
    seen.differing += text != seen.texts[number % NUM_TEXTS]
    seen.longest_pause_s = max(seen.longest_pause_s, stream.longest_pause_s)


async def _watch(server: Server, seen: Seen) -> None:
    """Note the most memory that a gateway's process takes."""
    while True:
        seen.peak_mb = max(seen.peak_mb, server.gateway.memory_info().rss / 1e6)
        await asyncio.sleep(_PERIOD_S)


def _body(model: str, number: int) -> dict[str, Any]:
    fixed = {"model": model, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    return {"prompt": f"Chapter {number}. In the", **fixed}


def text_of(events: Sequence[bytes]) -> str:
    """Return the text of a streamed completion. Raises BenchmarkError for one that did not end well."""
    if not events or events[-1] != b"data: [DONE]":
        raise BenchmarkError(f"a stream ended in {events[-1:]!r}")
    return "".join(json.loads(each.removeprefix(b"data: "))["choices"][0]["text"] for each in events[:-1])


def _address(server: Server) -> tuple[str, int]:
    parts = urlsplit(server.url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


@contextmanager
def running_redis(folder: Path) -> Iterator[str]:
    """Run a Redis that keeps nothing on disk, and yield its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        _await_port(port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def _await_port(port: int) -> None:
    for _ in range(200):
        with socket.socket() as connection:
            if connection.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise BenchmarkError("redis-server does not listen")


# --- what it costs ---

COST_STREAMS, COST_TOKENS, COST_ROUNDS = 32, 400, 5
Read = Callable[[str, dict[str, Any], dict[str, str]], Awaitable[int]]


def _measure_cost(folder: Path, report: ReportProgress) -> list[Figure]:
    """Measure the gateway's CPU time for an event: as it is, resumable, and shared."""
    report("CPU time of an event: plain, resumable, shared")
    checkpoint, model = find_checkpoint(None), model_name(find_checkpoint(None))
    kept = f"--stream-resume-secs={RESUME_S}"
    samples: dict[str, list[float]] = {"plain": [], "resumable": [], "shared through Redis": []}
    with (
        running_redis(folder) as url,
        running_server(checkpoint, folder / "cost.log", kept) as alone,
        running_server(checkpoint, folder / "cost-shared.log", kept, f"--stream-store={url}") as sharing,
    ):
        for number in range(COST_ROUNDS + 1):
            for subject, server in (("plain", alone), ("resumable", alone), ("shared through Redis", sharing)):
                cost = asyncio.run(_cpu_us(server, model, is_resumable=subject != "plain"))
                if number:  # the first round warms up
                    samples[subject].append(cost)
    return [Figure("CPU time of an event", subject, "us", tuple(found)) for subject, found in samples.items()]


async def _cpu_us(server: Server, model: str, *, is_resumable: bool) -> float:
    before = server.gateway_cpu_s()
    body = _body(model, 0) | {"max_tokens": COST_TOKENS}
    counts = await asyncio.gather(*(_count_events(server, body, is_resumable) for _ in range(COST_STREAMS)))
    return (server.gateway_cpu_s() - before) * 1e6 / sum(counts)


async def _count_events(server: Server, body: dict[str, Any], is_resumable: bool) -> int:
    """Read one stream, and return the number of its events."""
    reader, writer = await asyncio.open_connection(*_address(server))
    content = json.dumps(body).encode()
    switch = "x-sluice-resume: true\r\n" if is_resumable else ""
    head = f"POST {PATH} HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-length: {len(content)}\r\n{switch}\r\n"
    writer.write(head.encode() + content)
    count = 0
    while piece := await reader.read(65536):
        count += piece.count(b"data: ")
    writer.close()
    return count
