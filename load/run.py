"""One whole run: find the model, warm up, send the requests, measure."""

import asyncio
import os
import platform
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from load.apis import make_api
from load.callers import Caller, HttpCaller
from load.clock import Clock, RealClock
from load.config import ApiKind, LoadConfig, LoadConfigError, RequestPace
from load.connection import ConnectionPool, encode_request
from load.driver import Driver
from load.stream import LiveCounts, PlannedRequest, RequestResult
from load.summary import Summary, summarize
from load.workload import WARMUP_STREAM, planned_requests, prompt_source, requests_for

T = TypeVar("T")
ProgressView = Callable[[LiveCounts], Coroutine[Any, Any, None]]
"""Shows the progress of a run until it is cancelled."""


class RunError(Exception):
    """The run could not begin. The message is for the user.

    `is_refusal` tells a server that answered with another status than 200 from one that cannot be reached.
    """

    def __init__(self, message: str, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: its settings, its measurements, and the cost of measuring."""

    config: LoadConfig
    model: str
    prompt_exactness: str
    started_at: str
    machine: dict[str, str | int]
    """The machine and the Python of this process, by `read_machine_info`."""
    event_loop: str
    was_interrupted: bool
    summary: Summary
    client_cpu_s: float
    """CPU seconds of this process during the run. Close to `summary.wall_s`, the client was the limit."""
    client_cpu_us_per_event: float | None
    results: list[RequestResult]


def run_blocking(config: LoadConfig, view: ProgressView | None = None) -> Run:
    """Run `config` in an event loop of its own."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(run_load(config, view))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory where it is installed: it saves a good part of the client's CPU time."""
    with suppress(ModuleNotFoundError):
        import uvloop

        return uvloop.new_event_loop
    return None


async def run_load(config: LoadConfig, view: ProgressView | None = None, clock: Clock | None = None) -> Run:
    """Run `config`. Cancelled while sending (Ctrl-C), it returns the measurements until then.

    Raises `RunError` where the server cannot be reached or a warm-up request fails, `LoadConfigError` for bad
    settings.
    """
    clock = clock or RealClock()
    async with _caller(config, clock) as caller:
        return await _measure(Driver(config.workload, caller, clock), caller.model, config, view)


@asynccontextmanager
async def _caller(config: LoadConfig, clock: Clock) -> AsyncIterator[Caller]:
    """Open what sends the requests, with what it has to know of the model."""
    target, workload = config.target, config.workload
    if target.api in (ApiKind.GRPC_INFER, ApiKind.GRPC_STREAM):
        from load.grpc_calls import GrpcCaller

        if target.model is None:
            raise LoadConfigError(f"{target.api}: name the model with --model")
        async with GrpcCaller(target, workload, target.model, clock) as grpc_caller:
            yield grpc_caller
        return
    pool = ConnectionPool(target.url, clock.now)
    try:
        model = target.model or await _first_model(pool, config)
        api = make_api(target.api)
        await api.prepare(partial(_get, pool, config), model, workload)
        yield HttpCaller(target, workload, model, api, pool)
    finally:
        pool.close()


async def _measure(driver: Driver, model: str, config: LoadConfig, view: ProgressView | None) -> Run:
    prompts = prompt_source(config.target.api, config.workload)
    await _warm_up(driver, config.pace, planned_requests(config.workload, prompts, WARMUP_STREAM))
    requests = requests_for(config.pace, planned_requests(config.workload, prompts))
    driver.counts.num_planned = config.pace.num_requests
    started_at, cpu_before_s = datetime.now(UTC).isoformat(timespec="seconds"), time.process_time()
    is_complete = await _run_with_view(_drive(driver, requests, config.pace), view, driver.counts)
    client_cpu_s = time.process_time() - cpu_before_s
    num_events = driver.counts.num_token_events
    return Run(
        config=config,
        model=model,
        prompt_exactness=prompts.exactness,
        started_at=started_at,
        machine=read_machine_info(),
        event_loop=type(asyncio.get_running_loop()).__module__.partition(".")[0],
        was_interrupted=not is_complete,
        summary=summarize(driver.results, config.slo),
        client_cpu_s=client_cpu_s,
        client_cpu_us_per_event=client_cpu_s * 1e6 / num_events if num_events else None,
        results=driver.results,
    )


async def _drive(driver: Driver, requests: Iterator[PlannedRequest], pace: RequestPace) -> None:
    if pace.request_rate is not None or pace.replay_speed is not None:
        await driver.run_open(requests, pace)
        return
    assert pace.concurrency is not None, "Pace checks that one of the two is given"
    deadline_s = None if pace.duration_s is None else driver.clock.now() + pace.duration_s
    await driver.run_closed(requests, pace.concurrency, deadline_s)


async def _run_with_view(drive: Coroutine[Any, Any, None], view: ProgressView | None, counts: LiveCounts) -> bool:
    """Run `drive` with the progress view beside it. Returns False where it was cancelled."""
    viewer = asyncio.create_task(view(counts)) if view else None
    try:
        await drive
    except asyncio.CancelledError:
        return False
    finally:
        if viewer is not None:
            viewer.cancel()
            with suppress(asyncio.CancelledError):
                await viewer
    return True


async def _warm_up(driver: Driver, pace: RequestPace, requests: Iterator[PlannedRequest]) -> None:
    if not pace.warmup:
        return
    warm = replace(driver, counts=LiveCounts(), results=[])
    await warm.run_closed(islice(requests, pace.warmup), pace.concurrency or pace.warmup, deadline_s=None)
    for result in warm.results:
        if result.failure is not None:
            raise RunError(f"a warm-up request failed: {result.failure.label}: {result.failure.detail}")


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


@dataclass(slots=True)
class _WholeBody:
    """Collects a response (a `connection.ResponseReceiver`)."""

    status: int = 0
    body: bytes = b""

    def on_status(self, status: int) -> None:
        self.status = status

    def on_body(self, piece: bytes, at: float) -> None:
        self.body += piece


async def _first_model(pool: ConnectionPool, config: LoadConfig) -> str:
    """Return the first model of the server's /v1/models."""
    url = config.target.url
    try:
        return str(msgspec.json.decode(await _get(pool, config, "/v1/models"), type=_Models).data[0]["id"])
    except (msgspec.DecodeError, IndexError, KeyError):
        raise RunError(f"{url}/v1/models names no model: name it with --model") from None


async def get_json(pool: ConnectionPool, config: LoadConfig, path: str, kind: type[T]) -> T:
    """Get JSON of a type. Raises RunError also for an answer that is none."""
    try:
        return msgspec.json.decode(await _get(pool, config, path), type=kind)
    except msgspec.DecodeError as error:
        raise RunError(f"{config.target.url}{path}: {error}", is_refusal=True) from None


async def _get(pool: ConnectionPool, config: LoadConfig, path: str) -> bytes:
    """Get a path of the server. Raises RunError where it cannot be reached or does not answer 200."""
    target, response = config.target, _WholeBody()
    try:
        async with asyncio.timeout(target.timeout_s):
            connection = await pool.acquire()
            await connection.exchange(encode_request("GET", target.url, path, target.headers), response)
    except (OSError, TimeoutError) as error:
        raise RunError(f"cannot reach {target.url}: {error}") from error
    pool.release(connection)
    if response.status != 200:
        answer = response.body[:200].decode(errors="replace")
        raise RunError(
            f"{target.url}{path} answers {response.status}: name the model with --model ({answer})", is_refusal=True
        )
    return response.body


def read_machine_info() -> dict[str, str | int]:
    """Describe the machine: figures mean little without it."""
    return {
        "platform": platform.platform(),
        "processor": _processor_name(),
        "num_cores": os.cpu_count() or 1,
        "python": platform.python_version(),
        "sluice_version": _sluice_version(),
    }


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _sluice_version() -> str:
    try:
        return version("sluice")
    except PackageNotFoundError:
        return "not installed"
