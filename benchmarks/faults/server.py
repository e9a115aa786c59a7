"""A server that faults are tried on: how it is started, its processes, its memory, CPU time and metrics."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from benchmarks.figures import BenchmarkError

START_LIMIT_S, STOP_LIMIT_S = 600.0, 20.0
PROBE_S = 0.02
MODEL = "S"
"""The name that the model is served under."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds what a server may hold. `cache_tokens` is the size of its KV cache, None for its default."""

    num_seqs: int = 32
    cache_tokens: int | None = None
    max_model_len: int = 1024


@dataclass(frozen=True, slots=True)
class Launch:
    """The parts of a command line. `behind` are the URLs of the servers that a gateway sends requests to."""

    checkpoint: Path
    folder: Path
    port: int
    metrics_port: int
    limits: Limits
    behind: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Counters:
    """Names of a server's metrics; None for what it does not count."""

    running: str | None = None
    generated: str | None = None
    preemptions: str | None = None
    recomputed: str | None = None


def _itself(process: psutil.Process) -> list[psutil.Process]:
    return [process]


@dataclass(frozen=True, slots=True)
class Adapter:
    """The command that starts a kind of server, and the routes that show its state."""

    key: str
    """Its name in --only."""
    name: str
    version: str
    command: Callable[[Launch], Sequence[str | Path]]
    engines: Callable[[psutil.Process], list[psutil.Process]] = _itself
    """Returns the processes that compute, of a server's first process: the process itself where there is one."""
    counters: Counters = Counters()
    has_metrics_port: bool = False
    health: str = "/health"
    """The path of its readiness."""
    model: Callable[[Path], str] = lambda checkpoint: MODEL
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of each request besides OpenAI's."""
    behind: "Adapter | None" = None
    """The kind of server behind a gateway."""
    num_behind: int = 2


@dataclass(frozen=True, slots=True)
class FaultServer:
    """A running server. `launched_s` and `ready_s` are times by `time.perf_counter`."""

    adapter: Adapter
    url: str
    metrics_url: str
    model: str
    launched_s: float
    ready_s: float
    popen: "subprocess.Popen[bytes]"
    log: Path
    behind: tuple["FaultServer", ...] = ()

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def exit_code(self) -> int | None:
        """The exit code of the first process; None while it runs."""
        return self.popen.poll()

    def engines(self) -> list[psutil.Process]:
        """Return the processes that compute; of a gateway, those of the server behind it that runs most."""
        if self.behind:
            return max(self.behind, key=lambda each: each.metric(each.counters.running) or 0.0).engines()
        return self.adapter.engines(psutil.Process(self.popen.pid))

    def family(self) -> list[psutil.Process]:
        """Return all processes, without those of servers behind."""
        try:
            first = psutil.Process(self.popen.pid)
            return [first, *first.children(recursive=True)]
        except psutil.Error:
            return []

    def memory_mb(self) -> float:
        """Return the resident memory of all processes in MB. Shared pages count in each."""
        return sum(_or_zero(_resident_bytes, each) for each in self.family()) / 1e6

    def cpu_s(self) -> float:
        """Return the CPU seconds of all processes, with those of the servers behind."""
        mine = sum(_or_zero(_used_s, each) for each in self.family())
        return mine + sum(each.cpu_s() for each in self.behind)

    def metric(self, name: str | None) -> float | None:
        """Return the sum of a metric over its labels; None where the server has none or does not answer."""
        if self.behind and name is not None:
            found = [each.metric(name) for each in self.behind]
            return sum(each for each in found if each is not None) if any(x is not None for x in found) else None
        if name is None:
            return None
        try:
            with urlopen(self.metrics_url, timeout=2.0) as response:
                return sum_metric(response.read().decode(), name)
        except OSError:
            return None

    @property
    def counters(self) -> Counters:
        return self.adapter.behind.counters if self.adapter.behind else self.adapter.counters


def _resident_bytes(process: psutil.Process) -> float:
    return float(process.memory_info().rss)


def _used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _or_zero(read: Callable[[psutil.Process], float], process: psutil.Process) -> float:
    """Return what is read of a process, nothing of one that has ended."""
    try:
        return read(process)
    except psutil.Error:
        return 0.0


def sum_metric(page: str, name: str) -> float | None:
    """Return the sum of a metric's samples on a page in Prometheus' text format; None where it has none."""
    found = [line.rsplit(" ", 1)[1] for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(map(float, found)) if found else None


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def running(adapter: Adapter, checkpoint: Path, folder: Path, limits: Limits) -> Iterator[FaultServer]:
    """Start a server, with those behind it, yield it once it says that it is ready, and end all its processes."""
    with ExitStack() as stack:
        behind: tuple[FaultServer, ...] = ()
        if adapter.behind is not None:
            starts = (running(adapter.behind, checkpoint, folder, limits) for _ in range(adapter.num_behind))
            behind = tuple(stack.enter_context(start) for start in starts)
        port, metrics_port = free_ports(2)
        launch = Launch(checkpoint, folder, port, metrics_port, limits, [each.url for each in behind])
        log = folder / f"{adapter.key}-{port}.log"
        launched_s = time.perf_counter()
        process = stack.enter_context(_process([str(word) for word in adapter.command(launch)], log))
        url = f"http://127.0.0.1:{port}"
        ready_s = _await_ready(process, f"{url}{adapter.health}", log)
        metrics_url = f"http://127.0.0.1:{metrics_port if adapter.has_metrics_port else port}/metrics"
        model = adapter.model(checkpoint)
        yield FaultServer(adapter, url, metrics_url, model, launched_s, ready_s, process, log, behind)


@contextmanager
def _process(command: Sequence[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process with all of its session. What was stopped goes on first, or it could not end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_LIMIT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _await_ready(process: "subprocess.Popen[bytes]", health_url: str, log: Path) -> float:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(health_url, timeout=5.0):
                return time.perf_counter()
        except (URLError, OSError):
            time.sleep(PROBE_S)
    raise BenchmarkError(f"{log.name.rsplit('-', 1)[0]} did not become ready; see {log}")
