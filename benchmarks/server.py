"""Runs `sluice serve` of this environment as a subprocess, and measures its memory and CPU time."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import psutil

from benchmarks.figures import BenchmarkError

STOP_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of all processes of a server, in MB of 10^6 bytes. Shared pages count once in `pss`, in each in `rss`."""

    rss_mb: float
    pss_mb: float


@dataclass(frozen=True, slots=True)
class Server:
    """A ready server. `launched_s` is when it was started, by `time.perf_counter`."""

    url: str
    grpc_address: str
    metrics_url: str
    launched_s: float
    gateway: psutil.Process

    def memory(self) -> Memory:
        maps = [process.memory_full_info() for process in self.processes()]
        return Memory(sum(m.rss for m in maps) / 1e6, sum(m.pss for m in maps) / 1e6)

    def gateway_cpu_s(self) -> float:
        """Return the CPU seconds of the gateway process, without the engine's, since its start."""
        return cpu_s(self.gateway.pid)

    def processes(self) -> list[psutil.Process]:
        return [self.gateway, *self.gateway.children(recursive=True)]


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process since its start, by its clock: the kernel's other figures are in ticks."""
    return time.clock_gettime(~pid << 3 | 2)


@contextmanager
def running_server(
    checkpoint: Path | None, log: Path, *options: str, module: str = "cli", prefix: Sequence[str] = ()
) -> Iterator[Server]:
    """Start a server for `checkpoint` on free ports, yield it once it is ready, stop it. Its log goes to `log`.

    `checkpoint` None serves the bundled model with the RAG pipeline around it. `prefix` is a command that becomes the
    server's, such as `taskset`, and `module` has its main function.
    """
    ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    models = () if checkpoint is None else (str(checkpoint),)
    command = (*prefix, sys.executable, "-m", module, "serve", *models, *ports, *options)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stderr:
        launched_s = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield Server(*_await_ready(process, log), launched_s, psutil.Process(process.pid))
    finally:
        _stop(process)


@contextmanager
def running_engine(checkpoint: Path, log: Path, *options: str) -> Iterator[tuple[str, psutil.Process]]:
    """Start an engine that listens on TCP, yield its address and its launcher's process, and stop it."""
    command = (sys.executable, "-m", "sluice.cli", "engine", str(checkpoint), "--listen", "tcp://127.0.0.1:0", *options)
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"tcp://\S+:\d+", process.stdout.readline())
        if found is None:
            raise BenchmarkError(f"the engine did not start; see {log}")
        yield found[0], psutil.Process(process.pid)
    finally:
        _stop(process)


def write_engines(file: Path, **entries: dict[str, str]) -> str:
    """Write a file of engines for `--engines`, by their names, and return that option."""
    file.write_text(json.dumps({"engines": [{"name": name, **entry} for name, entry in entries.items()]}))
    return f"--engines={file}"


def _await_ready(process: "subprocess.Popen[str]", log: Path) -> tuple[str, str, str]:
    """Return the server's URL, its gRPC address and the URL of its metrics, from the line it prints when it listens.

    The next line means that it is ready.
    """
    assert process.stdout is not None
    listening = re.match(r"Listening on (\S+) .*metrics (\S+), gRPC ([^\s)]+)", process.stdout.readline())
    is_ready = bool(process.stdout.readline())
    if listening is None or not is_ready:
        raise BenchmarkError(f"the server did not start; see {log}")
    url = listening[1]
    with urlopen(f"{url}/v2/health/ready") as response:
        assert response.status == 200, "readiness and the ready line disagree"
    return url, listening[3], listening[2]


def _stop(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(STOP_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        assert process.stdout is not None
        process.stdout.close()
