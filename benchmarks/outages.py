"""Measures how clients of a fleet fare while a replica is killed or hangs, an engine's machine is silent, and the Redis
that names the engines stands still."""

import asyncio
import os
import re
import shutil
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import httpx
import psutil
from redis import Redis

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.recovery import NUM_STREAMS, TIMEOUT_S, Stream, read_all
from benchmarks.server import Server, running_engine, running_server, write_engines
from benchmarks.streaming.resumption import running_redis
from sluice.gateway.checkpoint import find_checkpoint, model_name

LONGEST_PAUSE_S = 1.0
NUM_CLIENTS = 16
BEFORE_S, STOPPED_S, AFTER_S = 10.0, 60.0, 10.0
"""Seconds of requests before Redis is stopped, meanwhile, and after it goes on."""
FLEET = "outages"
USUAL, EXACT = DTYPES = "bf16", "f32"
"""In bf16 the roundings of a step depend on what else is in it, so the same request may get another token anyway. In
f32 steps take longer."""
HEARTBEAT_TIMEOUT_S = 1.0
"""The server's setting where a replica hangs: a step must not take as long."""
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 0.8, "ignore_eos": False, "structured_outputs": {"regex": "[a-z ]{2000}"}},
    {"temperature": 0.8, "n": 2, "logprobs": 2},
)
"""The fields of a stream's request, by its number, which is its seed too."""
KILLED, HUNG, SILENT = (
    "two replicas, one killed",
    "two replicas, one hung",
    "two engines over TCP, one's machine silent",
)


@dataclass(slots=True)
class MixedStream(Stream):
    """A stream of one of KINDS. Its text is that of all its choices."""

    choices: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    def body(self) -> dict[str, Any]:
        plain = Stream.body(self)
        return plain | {"seed": self.number} | KINDS[self.number % len(KINDS)]

    def _take(self, event: dict[str, Any]) -> None:
        Stream._take(self, event)
        choice = event["choices"][0]
        self.choices[choice["index"]].append(choice["text"])

    @property
    def text(self) -> str:
        return "\0".join("".join(self.choices[index]) for index in sorted(self.choices))


def measure(num_repeats: int, folder: Path, bundled: Path | None, report: ReportProgress) -> list[Figure]:
    """Measure the bundled model (or the checkpoint `bundled` in its place): losses, each on a server of its own, and
    one minute without Redis."""
    checkpoint = bundled or find_checkpoint(None)
    name = model_name(checkpoint)
    figures: list[Figure] = []
    for subject in (KILLED, HUNG, SILENT):
        samples: dict[str, list[float]] = defaultdict(list)
        for repeat in range(num_repeats):
            for dtype in DTYPES:
                with _fleet(subject, checkpoint, folder, dtype) as fleet:
                    found = asyncio.run(_lose_one(fleet, name, subject))
                for figure, value in found:
                    samples[f"{figure}, {dtype}"].append(value)
                report(f"{subject}, {dtype}, {repeat + 1} of {num_repeats}: {found}")
        units = _units(subject).items()
        figures += [Figure(each, subject, unit, tuple(samples[each]), target) for each, (unit, target) in units]
    if shutil.which("redis-server") is None:
        report("no redis-server in PATH: the minute without Redis is not measured")
        return figures
    return figures + _stop_redis(folder, checkpoint, name, report)


class Fleet(NamedTuple):
    """A server with two engines, the processes of the one to be lost, and the server's log."""

    server: Server
    lost: list[psutil.Process]
    log: Path


@contextmanager
def _fleet(subject: str, checkpoint: Path, folder: Path, dtype: str) -> Iterator[Fleet]:
    """Start a server with two engines."""
    precision = f"--dtype={dtype}"
    log = folder / "outages-server.log"
    if subject != SILENT:
        options = (f"--engine-heartbeat-timeout-secs={HEARTBEAT_TIMEOUT_S}",) if subject == HUNG else ()
        with running_server(checkpoint, log, "--replicas=2", precision, *options) as server:
            yield Fleet(server, server.gateway.children()[:1], log)
        return
    with ExitStack() as stack:
        (first, launcher), (second, _) = (
            stack.enter_context(
                running_engine(checkpoint, folder / f"outages-engine-{name}.log", precision, "--num-threads=1")
            )
            for name in "ab"
        )
        engines = write_engines(folder / "outages-engines.json", a={"address": first}, b={"address": second})
        server = stack.enter_context(running_server(checkpoint, log, engines))
        lost = [launcher, *launcher.children(recursive=True)]
        stack.callback(_each, lost, psutil.Process.resume)
        yield Fleet(server, lost, log)


def _each(processes: Iterable[psutil.Process], act: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            act(process)


def _units(subject: str) -> dict[str, tuple[str, Target | None]]:
    most_s = LONGEST_PAUSE_S + (HEARTBEAT_TIMEOUT_S if subject == HUNG else 0.0)
    return {
        f"loss to streams sent elsewhere, {USUAL}": ("s", Target(most_s)),
        f"longest pause of a stream, {USUAL}": ("s", None if subject == SILENT else Target(most_s)),
        f"longest pause before, {USUAL}": ("s", None),
        f"streams that moved, {USUAL}": ("", None),
        f"streams whose text differs, {EXACT}": (f"of {NUM_STREAMS}", Target(0)),
        f"longest pause of a stream, {EXACT}": ("s", None),
    }


async def _lose_one(fleet: Fleet, model: str, subject: str) -> list[tuple[str, float]]:
    server, lost, log = fleet
    limits = httpx.Limits(max_connections=NUM_STREAMS + 1)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, limits=limits) as client:
        undisturbed = [MixedStream(number, model) for number in range(NUM_STREAMS)]
        await read_all(client, undisturbed)
        streams = [MixedStream(number, model) for number in range(NUM_STREAMS)]
        reading = asyncio.create_task(read_all(client, streams))
        under_way = asyncio.gather(*(stream.is_under_way.wait() for stream in streams))
        await asyncio.wait((reading, under_way), return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            under_way.cancel()
            reading.result()
            raise BenchmarkError("streams ended before each had begun")
        lost_at = datetime.now()
        _each(lost, psutil.Process.kill if subject == KILLED else psutil.Process.suspend)
        try:
            await reading
        finally:
            if subject == HUNG:
                _each(lost, psutil.Process.kill)
        metrics = (await client.get(server.metrics_url)).text
    moved_s = (_moved_at(log) - lost_at).total_seconds()
    return [("loss to streams sent elsewhere", moved_s), *_judge(undisturbed, streams, metrics)]


def _moved_at(log: Path) -> datetime:
    found = re.search(r"^(\S+ \S+),(\d+) WARNING engine\.fleet\.moving", log.read_text(), re.MULTILINE)
    if found is None:
        raise BenchmarkError(f"no stream was sent elsewhere; see {log}")
    return datetime.fromisoformat(f"{found[1]}.{found[2]}")


def _judge(undisturbed: Sequence[Stream], streams: Sequence[Stream], metrics: str) -> Iterator[tuple[str, float]]:
    yield "longest pause of a stream", max(max(stream.pauses)[0] for stream in streams)
    yield "longest pause before", max(max(stream.pauses)[0] for stream in undisturbed)
    same = [before.text == now.text for before, now in zip(undisturbed, streams, strict=True)]
    yield "streams whose text differs", len(same) - sum(same)
    resumed = "sluice_engine_resumed_requests_total{"
    yield (
        "streams that moved",
        sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(resumed)),
    )


def _stop_redis(folder: Path, checkpoint: Path, model: str, report: ReportProgress) -> list[Figure]:
    subject = "two registered engines, Redis stopped"
    with ExitStack() as stack:
        url = stack.enter_context(running_redis(folder))
        fleet = f"{url}#{FLEET}"
        for name in "ab":
            options = ("--register", fleet, "--register-name", name, "--num-threads=1")
            stack.enter_context(running_engine(checkpoint, folder / f"outages-engine-{name}.log", *options))
        server = stack.enter_context(running_server(checkpoint, folder / "outages-redis.log", f"--engines={fleet}"))
        pid = int(Redis.from_url(url).info("server")["process_id"])
        report(f"{BEFORE_S + STOPPED_S + AFTER_S:.0f} s of requests, Redis stopped for {STOPPED_S:.0f} of them")
        streams, num_failed = asyncio.run(_ask_meanwhile(server, model, pid))
    texts = {stream.text for stream in streams}
    pause_s = max(max(stream.pauses)[0] for stream in streams)
    return [
        Figure("requests", subject, "", (float(len(streams)),)),
        Figure("failed requests", subject, "", (float(num_failed),), Target(0)),
        Figure("different texts", subject, "", (float(len(texts)),), Target(1)),
        Figure("longest pause of a stream", subject, "s", (pause_s,)),
    ]


async def _ask_meanwhile(server: Server, model: str, redis_pid: int) -> tuple[list[Stream], int]:
    """Keep asking for one text while Redis stops and goes on. Returns the streams, and how many failed."""
    end, streams, num_failed = perf_counter() + BEFORE_S + STOPPED_S + AFTER_S, list[Stream](), 0

    async def keep_asking(client: httpx.AsyncClient) -> None:
        nonlocal num_failed
        while perf_counter() < end:
            stream = Stream(0, model)
            try:
                await stream.read(client)
            except (BenchmarkError, httpx.HTTPError):
                num_failed += 1
            if len(stream.texts) > 1:
                streams.append(stream)
            else:
                num_failed += 1

    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        asking = [asyncio.create_task(keep_asking(client)) for _ in range(NUM_CLIENTS)]
        await asyncio.sleep(BEFORE_S)
        os.kill(redis_pid, signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        os.kill(redis_pid, signal.SIGCONT)
        await asyncio.gather(*asking)
    return streams, num_failed
