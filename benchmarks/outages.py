"""What clients of a fleet notice while a replica is killed or hangs, and while the Redis that names the engines stands
still."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import psutil
from redis import Redis

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.recovery import NUM_STREAMS, TIMEOUT_S, Stream, read_all
from benchmarks.server import Server, running_server
from benchmarks.streaming.resumption import running_redis
from gateway.checkpoint import find_checkpoint, model_name

LONGEST_PAUSE_S = 1.0
NUM_CLIENTS = 16
BEFORE_S, STOPPED_S, AFTER_S = 10.0, 60.0, 10.0
"""Seconds of requests before Redis is stopped, meanwhile, and after it goes on."""
FLEET = "outages"
HEARTBEAT_TIMEOUT_S = 1.0
"""The server's setting where a replica hangs: a step must not take as long."""
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 0.8, "structured_outputs": {"regex": "[a-z ]+"}},
    {"temperature": 0.8, "n": 2, "logprobs": 2},
)
"""What a stream asks for, by its number. Each has its number for a seed."""
LOSSES: dict[str, signal.Signals] = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP}


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
    """Measure the bundled model (or the checkpoint `bundled` in its place): kills, each on a server of its own, and one
    minute without Redis."""
    checkpoint = bundled or find_checkpoint(None)
    name = model_name(checkpoint)
    figures: list[Figure] = []
    for loss in LOSSES:
        samples: dict[str, list[float]] = defaultdict(list)
        for repeat in range(num_repeats):
            log = folder / f"outages-{loss}-{repeat}.log"
            with running_server(checkpoint, log, "--replicas=2", *_options(loss)) as server:
                for figure, value in asyncio.run(_lose_one(server, name, LOSSES[loss])):
                    samples[figure].append(value)
            report(f"{loss}, {repeat + 1} of {num_repeats}: {samples['longest pause of a stream'][-1]:.2f} s")
        subject = f"two replicas, one {loss}"
        figures += [Figure(each, subject, unit, tuple(samples[each]), t) for each, (unit, t) in _units(loss).items()]
    if shutil.which("redis-server") is None:
        report("no redis-server in PATH: the minute without Redis is not measured")
        return figures
    return figures + _stop_redis(folder, checkpoint, name, report)


def _options(loss: str) -> tuple[str, ...]:
    return (f"--engine-heartbeat-timeout-secs={HEARTBEAT_TIMEOUT_S}",) if loss == "hung" else ()


def _units(loss: str) -> dict[str, tuple[str, Target | None]]:
    most_s = LONGEST_PAUSE_S + (HEARTBEAT_TIMEOUT_S if loss == "hung" else 0.0)
    return {
        "longest pause of a stream": ("s", Target(most_s)),
        "longest pause before": ("s", None),
        "streams whose text differs": (f"of {NUM_STREAMS}", Target(0)),
        "streams that moved": (f"of {NUM_STREAMS}", None),
    }


async def _lose_one(server: Server, model: str, loss: signal.Signals) -> Iterator[tuple[str, float]]:
    limits = httpx.Limits(max_connections=NUM_STREAMS + 1)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, limits=limits) as client:
        undisturbed = [MixedStream(number, model) for number in range(NUM_STREAMS)]
        await read_all(client, undisturbed)
        streams = [MixedStream(number, model) for number in range(NUM_STREAMS)]
        reading = asyncio.create_task(read_all(client, streams))
        await asyncio.gather(*(stream.is_under_way.wait() for stream in streams))
        lost = server.gateway.children()[0]
        lost.send_signal(loss)
        try:
            await reading
        finally:
            _end(lost)
        metrics = (await client.get(server.metrics_url)).text
    return _judge(undisturbed, streams, metrics)


def _end(process: psutil.Process) -> None:
    """Kill a process that hangs, if its gateway has not done so."""
    if process.is_running():
        process.kill()


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
            stack.enter_context(_running_engine(checkpoint, folder / f"outages-engine-{name}.log", fleet, name))
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


@contextmanager
def _running_engine(checkpoint: Path, log: Path, fleet: str, name: str) -> Iterator[None]:
    """Start an engine that registers itself, and stop it."""
    listen = ("--listen", "tcp://127.0.0.1:0", "--register", fleet, "--register-name", name, "--num-threads", "1")
    command = (sys.executable, "-m", "cli", "engine", str(checkpoint), *listen)
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise BenchmarkError(f"the engine did not start; see {log}")
        yield
    finally:
        process.terminate()
        process.communicate()
