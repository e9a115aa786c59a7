"""`sluice serve` as its users have it: a process of its own, on free ports, with a small model made on the spot."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import httpx
import psutil

from tests.fork_server import fork_server
from tests.waiting import PATIENCE_S

MODEL = "tiny"


@dataclass
class ServerProcess:
    """A running `sluice serve`, and the lines it has printed."""

    process: subprocess.Popen[str]
    log_path: Path
    base_url: str
    metrics_url: str
    listening_line: str
    ready_line: str = ""
    grpc_address: str = ""
    model: str = MODEL

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline()
        assert self.ready_line, self.log

    def engine(self) -> psutil.Process:
        """The engine's process."""
        [child] = self.engines()
        return child

    def engines(self) -> list[psutil.Process]:
        """The processes of all engines."""
        return [each for each in psutil.Process(self.pid).children() if not _is_worker(each)]

    def workers(self) -> list[psutil.Process]:
        """The processes of the HTTP workers."""
        return [each for each in psutil.Process(self.pid).children() if _is_worker(each)]

    def client(self, **settings: object) -> httpx.Client:
        return httpx.Client(base_url=self.base_url, timeout=PATIENCE_S, **settings)  # type: ignore[arg-type]

    def wait_exit(self) -> int:
        return self.process.wait(PATIENCE_S)


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "sluice.gateway.workers.worker" in process.cmdline()
    except psutil.Error:  # it has ended
        return False


StartServer = Callable[..., ServerProcess]


def serve_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sluice.cli", "serve", "--grpc-port=0", *arguments]


def start_command(
    command: list[str], log: TextIO, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start `python -m sluice.cli ...`: by a fork where it may have the imports of another."""
    if fork_server().suits(environment):
        return fork_server().start(command[3:], log)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)


@contextmanager
def running_server(checkpoint: Path, log_path: Path, *arguments: str) -> Iterator[ServerProcess]:
    """A server that listens; call `wait_ready` before asking it for tokens."""
    with running_command(log_path, str(checkpoint), "--served-model-name", MODEL, *arguments) as server:
        yield server


@contextmanager
def running_bundled(log_path: Path, *arguments: str) -> Iterator[ServerProcess]:
    """The same with what `sluice serve` serves by itself: the bundled model, and the pipeline around it."""
    with running_command(log_path, *arguments) as server:
        yield server


@contextmanager
def running_command(
    log_path: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """`sluice serve` with these arguments, on free ports."""
    command = serve_command("--http-port=0", "--metrics-port=0", *arguments)
    with log_path.open("w") as log:
        process = start_command(command, log, environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Listening on "), log_path.read_text()
        found = re.fullmatch(r"Listening on (\S+) \(metrics ([^,)]+)(, gRPC (\S+))?\)\n", line)
        assert found, line
        yield ServerProcess(process, log_path, found[1], found[2], line, grpc_address=found[4] or "")
    finally:
        process.kill()
        process.communicate()
