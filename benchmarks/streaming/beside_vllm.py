"""The front end beside vLLM's: both servers stay up, and take turns with the same load on the same bundled model.

First with engines that compute nothing, each front end on a core of its own; then with the real engines on all cores.
"""

import os
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import psutil

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.offline.engines import vllm_variables
from benchmarks.offline.environments import VLLM, interpreter
from benchmarks.server import Server, cpu_s, running_server
from benchmarks.streaming.client import Client, Load, chat_request
from benchmarks.streaming.engine import CORES_VARIABLE
from benchmarks.streaming.streams import HEAVY, cores, gateway_alone, joined
from gateway.checkpoint import find_checkpoint, model_name

START_LIMIT_S, STOP_LIMIT_S = 400.0, 30.0
IDLE_S = 6.0
"""Pause before each turn. vLLM's worker spins for seconds after a load, and would take time from whoever is next."""
LIGHT = 3000.0
"""Tokens/s for which both front ends have time."""
RATIO_TARGET = Target(3.0, is_ceiling=False)


@dataclass(frozen=True, slots=True)
class Row:
    """Streams of `tokens` tokens each. `offered` tokens/s come from an engine that computes nothing; 0: it computes."""

    streams: int
    requests: int
    tokens: int
    offered: float = 0.0

    @property
    def name(self) -> str:
        engine = f"{self.offered:,.0f}/s offered" if self.offered else "computed"
        return f"{self.streams} streams, {engine}"


NULL_ROWS = (Row(64, 128, 128, LIGHT), Row(64, 512, 256, HEAVY), Row(512, 1024, 128, HEAVY))
REAL_ROWS = (Row(1, 6, 128), Row(32, 64, 128), Row(64, 192, 128))


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that takes part. `front` is the process that has the connections."""

    name: str
    port: int
    front: psutil.Process

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU seconds of the front end and of all processes since their start."""
        front_s = cpu_s(self.front.pid)
        return front_s, front_s + sum(cpu_s(child.pid) for child in self.front.children(recursive=True))


def measure(num_repeats: int, folder: Path, report: ReportProgress) -> list[Figure]:
    """Measure all rows; Sluice and vLLM take turns in an order that changes with each repeat."""
    python = interpreter(VLLM, folder / "envs", report)
    client = Client.build(folder, cores()[1])
    log = folder / "streams.log"
    figures: list[Figure] = []
    for rows, ours in (
        (NULL_ROWS, lambda: gateway_alone(log, is_pinned=True)),
        (REAL_ROWS, lambda: running_server(find_checkpoint(None), log)),
    ):
        is_null = bool(rows[0].offered)
        report(f"starting vLLM, {'with an engine that computes nothing' if is_null else 'as it is'}; a minute or two")
        with _vllm(python, folder, is_null=is_null) as theirs, _sluice(ours) as sluice:
            figures += _take_turns((sluice, theirs), rows, client, num_repeats, report)
    return figures


@contextmanager
def _sluice(start: Callable[[], AbstractContextManager[Server]]) -> Iterator[Peer]:
    with start() as server:
        port = urlsplit(server.url).port
        assert port is not None
        yield Peer("Sluice", port, server.gateway)


@contextmanager
def _vllm(python: Path, folder: Path, *, is_null: bool) -> Iterator[Peer]:
    """Run vLLM's server with the bundled model, yield it once it is ready, end it with all its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    checkpoint, (ours, others) = find_checkpoint(None), cores()
    null = (f"{CORES_VARIABLE}={joined(others)}", "taskset", "-c", joined(ours))
    arguments = ("--model", checkpoint, "--served-model-name", model_name(checkpoint), "--port", port)
    options = ("--host", "127.0.0.1", "--max-num-seqs", 1024, "--disable-uvicorn-access-log")
    eager = ("--enforce-eager",) if is_null else ()
    command = ("env", *vllm_variables(1, folder), *(null if is_null else ()), python)
    script = Path(__file__).with_name("vllm_server.py")
    log = folder / "streams-vllm.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(word) for word in (*command, script, *arguments, *options, *eager)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _await_ready(process, port, log)
        yield Peer("vLLM", port, psutil.Process(process.pid))
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health"):
                return
        except (URLError, ConnectionError):
            time.sleep(1.0)
    raise BenchmarkError(f"vLLM did not become ready; see {log}")


def _take_turns(
    peers: tuple[Peer, Peer], rows: tuple[Row, ...], client: Client, num_repeats: int, report: ReportProgress
) -> Iterator[Figure]:
    samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for peer in peers:
        for row in rows:  # warm up: vLLM compiles for each new size of a batch
            client.run(peer.port, _request(row), streams=row.streams, requests=row.streams, tokens=row.tokens)
    for repeat in range(num_repeats):
        for row in rows:
            for peer in peers if repeat % 2 == 0 else peers[::-1]:
                time.sleep(IDLE_S)
                values = _measure_turn(peer, row, client)
                report(f"{peer.name}, {row.name}: " + ", ".join(f"{n} {v:.5g}" for n, (v, _) in values.items()))
                for name, (value, unit) in values.items():
                    samples[name, f"{peer.name}, {row.name}", unit].append(value)
    for (name, subject, unit), found in samples.items():
        yield Figure(name, subject, unit, tuple(found))
    for row in rows:
        ours, theirs = (samples["front end's CPU", f"{peer.name}, {row.name}", "us/token"] for peer in peers)
        ratios = tuple(theirs / ours for ours, theirs in zip(ours, theirs, strict=True))
        yield Figure("tokens/s per core of front end", row.name, "times vLLM's", ratios, RATIO_TARGET)


def _request(row: Row) -> bytes:
    return chat_request(model_name(find_checkpoint(None)), row.tokens, seed=int(row.offered), temperature=0.0)


def _measure_turn(peer: Peer, row: Row, client: Client) -> dict[str, tuple[float, str]]:
    before = peer.cpu_s()
    load: Load = client.run(peer.port, _request(row), streams=row.streams, requests=row.requests, tokens=row.tokens)
    front_s, all_s = (now - then for now, then in zip(peer.cpu_s(), before, strict=True))
    return {
        "output": (load.tokens_per_s, "tokens/s"),
        "events with text": (load.events * 1e6 / load.elapsed, "events/s"),
        "front end's CPU": (front_s * 1e6 / load.tokens, "us/token"),
        "front end's CPU an event": (front_s * 1e6 / load.events, "us/event"),
        "CPU of all processes": (all_s * 1e6 / load.tokens, "us/token"),
        "TTFT p50": (load.first_p50 / 1e3, "ms"),
        "ITL p50": (load.gap_p50 / 1e3, "ms"),
    }
