"""Runs both servers as subprocesses on free ports: this checkout's Sluice, and tritonserver from its PyPI wheel."""

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import psutil

from benchmarks.figures import BenchmarkError, ReportProgress
from benchmarks.offline.environments import Environment, interpreter

START_LIMIT_S = 120.0
STOP_LIMIT_S = 20.0

TRITON = Environment("triton", "nvidia-pytriton", "0.7.0", ("numpy==1.26.*",))
"""The environment of tritonserver. Its Python backend reads arrays of numpy 2 wrongly, so it gets numpy 1."""


@dataclass(frozen=True, slots=True)
class V2Server:
    """A ready server."""

    name: str
    http_port: int
    grpc_port: int
    process: psutil.Process

    def is_alive(self) -> bool:
        return self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE

    def rss_mb(self) -> float:
        """Return the memory of the server's own process, without its workers, in MB of 10^6 bytes."""
        return float(self.process.memory_info().rss / 1e6)

    def cpu_s(self) -> float:
        """Return the CPU time of the server's own process, without its workers, in seconds."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def sluice(repository: Path, log: Path, *flags: str, name: str = "sluice") -> Iterator[V2Server]:
    """Run this checkout's server with `repository` alone."""
    http, grpc, metrics = _free_ports()
    command = [
        sys.executable,
        "-m",
        "sluice.cli",
        "serve",
        "--allow-client-shm=1",
        "--model-repository",
        str(repository),
    ]
    ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    with _running(name, [*command, *ports, *flags], None, log, http, grpc) as server:
        yield server


@contextmanager
def tritonserver(repository: Path, environments: Path, log: Path, report: ReportProgress) -> Iterator[V2Server]:
    """Run tritonserver 2.51, which is installed under `environments` where it is missing."""
    home, python = _install(environments, report)
    http, grpc, metrics = _free_ports()
    command = [
        str(home / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={home / 'backends'}",
        f"--http-port={http}",
        f"--grpc-port={grpc}",
        f"--metrics-port={metrics}",
        "--exit-timeout-secs=3",
    ]
    libraries = (home.parents[1] / "nvidia_pytriton.libs", Path(sysconfig.get_config_var("LIBDIR")))
    inherited = dict(os.environ)  # noqa: TID251 - it is the child's environment, not our configuration
    environment = {
        **inherited,
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        # Its Python workers take the packages of the first python3 in PATH.
        "PATH": f"{python.parent}:{inherited.get('PATH', '')}",
    }
    with _running("triton", command, environment, log, http, grpc) as server:
        yield server


def _install(environments: Path, report: ReportProgress) -> tuple[Path, Path]:
    """Install the server with the worker for this Python. Returns its folder and its environment's interpreter."""
    python = interpreter(TRITON, environments, report)
    site = Path(sysconfig.get_path("platlib", vars={"platbase": str(python.parents[1])}))
    home = site / "pytriton" / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = home / "backends" / "python" / "triton_python_backend_stub"
    if not stub.is_file():
        shutil.copy(home / "python_backend_stubs" / version / stub.name, stub)
    for program in (stub, home / "bin" / "tritonserver"):
        program.chmod(0o755)
    return home, python


@contextmanager
def _running(
    name: str, command: list[str], environment: dict[str, str] | None, log: Path, http: int, grpc: int
) -> Iterator[V2Server]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        _await_ready(process, http, log)
        yield V2Server(name, http, grpc, psutil.Process(process.pid))
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _await_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urlopen(f"http://127.0.0.1:{port}/v2/health/ready") as response:
                if response.status == 200:
                    return
        except (OSError, HTTPException):
            time.sleep(0.1)
    raise BenchmarkError(f"the server did not become ready; see {log}")


def _free_ports() -> tuple[int, int, int]:
    """Return ports that were free a moment ago: tritonserver cannot choose one itself."""
    with socket.socket() as one, socket.socket() as two, socket.socket() as three:
        for each in (one, two, three):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1], three.getsockname()[1]
