"""Sluice and vLLM as servers that take turns with the same load, and the CPU time of their processes."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import psutil

from benchmarks.figures import BenchmarkError
from benchmarks.offline.engines import vllm_variables
from benchmarks.server import Server, cpu_s
from sluice.gateway.checkpoint import find_checkpoint, model_name

START_LIMIT_S, STOP_LIMIT_S = 400.0, 30.0
IDLE_S = 6.0
"""Pause before each turn. vLLM's worker spins for seconds after a load, and would take time from whoever is next."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that takes part. `front` are the processes in front of the engine's own, that with the connections
    first."""

    name: str
    port: int
    metrics_url: str
    front: tuple[psutil.Process, ...]

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU seconds of the front end and of all processes since their start."""
        front_s = sum(cpu_s(process.pid) for process in self.front)
        known = {process.pid for process in self.front}
        others = (child for child in self.front[0].children(recursive=True) if child.pid not in known)
        return front_s, front_s + sum(cpu_s(child.pid) for child in others)

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        with urlopen(self.metrics_url) as response:
            lines = response.read().decode().splitlines()
        found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        if not found:
            raise BenchmarkError(f"{self.metrics_url} has no {name}")
        return sum(found)


@contextmanager
def sluice(start: Callable[[], AbstractContextManager[Server]], *, has_engine_in_front: bool = False) -> Iterator[Peer]:
    """Run Sluice. With `has_engine_in_front`, its engine's process is part of the front end: a caller of vLLM's."""
    with start() as server:
        port = urlsplit(server.url).port
        assert port is not None
        front = (server.gateway, *(server.gateway.children() if has_engine_in_front else ()))
        yield Peer("Sluice", port, server.metrics_url, front)


@contextmanager
def vllm(
    python: Path, folder: Path, *options: str, checkpoint: Path | None = None, variables: tuple[str, ...] = ()
) -> Iterator[Peer]:
    """Run vLLM's server with `checkpoint` (None: the bundled model), yield it once it is ready, end it with all its
    processes. `variables` are of its environment, and may end with a command that becomes the server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    checkpoint = checkpoint or find_checkpoint(None)
    arguments = ("--model", checkpoint, "--served-model-name", model_name(checkpoint), "--port", port)
    common = ("--host", "127.0.0.1", "--disable-uvicorn-access-log")
    command = ("env", *vllm_variables(1, folder), *variables, python)
    script = Path(__file__).with_name("vllm_server.py")
    log = folder / "streams-vllm.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(word) for word in (*command, script, *arguments, *common, *options)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _await_ready(process, port, log)
        yield Peer("vLLM", port, f"http://127.0.0.1:{port}/metrics", (psutil.Process(process.pid),))
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
