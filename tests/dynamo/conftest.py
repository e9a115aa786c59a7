"""NVIDIA Dynamo's own front end and KV router, with workers of ours behind them: files for discovery, TCP for requests,
ZeroMQ for events."""

import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest

from tests.paths import DYNAMO_BIN, MODELS
from tests.server_process import ServerProcess, running_command
from tests.waiting import wait_until

RILL = MODELS / "rill" / "1"
PATIENCE_S = 120.0
USED = "dynamo_component_gpu_cache_usage_percent"
TOTAL = "dynamo_component_total_blocks"


@dataclass
class Worker:
    """A running `sluice dynamo-worker`. Dynamo serves its metrics at `metrics_url`."""

    process: subprocess.Popen[bytes]
    log: Path
    metrics_url: str

    def used_blocks(self) -> float:
        lines = httpx.get(self.metrics_url, timeout=PATIENCE_S).text.splitlines()
        used, total = (
            sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))
            for name in (USED, TOTAL)
        )
        return used * total

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Deployment:
    """A front end and its workers, in a folder that they find each other in."""

    folder: Path
    port: int
    stack: ExitStack
    workers: dict[str, Worker] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.base_url}/v1", api_key="unused", timeout=PATIENCE_S, max_retries=0)

    def environment(self, **others: str) -> dict[str, str]:
        return {**os.environ, "DYN_FILE_KV": str(self.folder / "discovery"), **others}  # noqa: TID251 - for children

    def start(self, name: str, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        words = [str(DYNAMO_BIN / command[0]), *command[1:]]
        return self.stack.enter_context(_running(words, self.folder / name, self.environment(**environment)))

    def add_worker(self, name: str, model: Path, *options: str) -> Worker:
        """Start a worker of the model that is served as the part of `name` before its dash, and wait for it."""
        port = free_port()
        model_name = name.partition("-")[0]
        served = f"--served-model-name={model_name}"
        command = ("sluice", "dynamo-worker", str(model), served, "--dtype=f32", *options)
        before = len(self.instances())
        process = self.start(name, *command, DYN_SYSTEM_PORT=str(port))
        worker = Worker(process, self.folder / name, f"http://127.0.0.1:{port}/metrics")
        self.workers[name] = worker
        wait_until(lambda: self._is_there(worker, model_name, before), lambda: worker.log.read_text()[-4000:])
        return worker

    def _is_there(self, worker: Worker, model: str, before: int) -> bool:
        """Whether the front end knows the worker, and its model too, which it hears of later."""
        assert worker.process.poll() is None, worker.log.read_text()[-4000:]
        return len(self.instances()) > before and model in {each.id for each in self.client().models.list()}

    def instances(self) -> list[object]:
        """The workers that the front end knows of."""
        try:
            answer = httpx.get(f"{self.base_url}/health", timeout=PATIENCE_S).json()
        except httpx.TransportError:
            return []
        found: list[object] = answer.get("instances", [])
        return found


@contextmanager
def _running(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """Return a port that nobody has; Dynamo takes none above 32,767 for its metrics."""
    while True:
        port = random.randint(15_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture(scope="session")
def dynamo(request: pytest.FixtureRequest) -> None:
    if "dynamo" not in request.config.getoption("markexpr"):
        pytest.skip("Dynamo takes a while to start: `make test-dynamo` runs its tests")
    if not (DYNAMO_BIN / "sluice").is_file():
        pytest.skip("Dynamo is not installed: `make test-dynamo` installs it into build/dynamo-venv")


@contextmanager
def running_deployment(folder: Path) -> Iterator[Deployment]:
    """A front end without workers; its requests go on in another worker up to three times."""
    with ExitStack() as stack:
        deployment = Deployment(folder, free_port(), stack)
        places = ["--discovery-backend=file", "--request-plane=tcp", "--event-plane=zmq", "--router-mode=kv"]
        http = ["--http-host=127.0.0.1", f"--http-port={deployment.port}", "--migration-limit=3"]
        deployment.start("frontend", "python", "-m", "dynamo.frontend", *places, *http)
        yield deployment


@pytest.fixture(scope="session")
def deployment(dynamo: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two workers of the bundled model."""
    with running_deployment(tmp_path_factory.mktemp("dynamo")) as running:
        running.add_worker("rill-1", RILL)
        running.add_worker("rill-2", RILL)
        yield running


@pytest.fixture(scope="session")
def server(dynamo: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The same model behind our own gateway."""
    log = tmp_path_factory.mktemp("log") / "server"
    with running_command(log, str(RILL), "--served-model-name=rill", "--dtype=f32") as running:
        running.wait_ready()
        yield running
