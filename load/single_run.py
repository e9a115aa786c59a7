"""A run of one process: find the model, warm up, send the requests, measure."""

import asyncio
import os
import platform
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from sluice.load.answers import needs_answers
from sluice.load.apis import Api, check_extras, make_api
from sluice.load.apis.rag import DEFAULT_PIPELINE
from sluice.load.callers import Caller, Clock, HttpCaller
from sluice.load.config import ApiKind, LoadConfig, LoadConfigError, RequestPace
from sluice.load.connection import ConnectionPool, RunError, get, get_json
from sluice.load.driver import Driver
from sluice.load.shares import WHOLE, Begin, Share
from sluice.load.stream import LiveCounts, PlannedRequest, RequestResult
from sluice.load.summary import Summary, summarize
from sluice.load.watch.watcher import Watched, Watcher
from sluice.load.workload import WARMUP_STREAM, first_requests, planned_requests, prompt_source, requests_for


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


ProgressView = Callable[[LiveCounts], Coroutine[Any, Any, None]]
"""Shows the progress of a run until it is cancelled."""


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
    """CPU seconds of this client during the run, of all its processes."""
    client_cpu_us_per_event: float | None
    results: list[RequestResult]
    busiest_cpu_s: float = 0.0
    """CPU seconds of the process that used most. Close to `summary.wall_s`, the client was the limit."""
    watched: Watched = field(default_factory=Watched)
    """The readings of the server's metrics and of the meters of energy."""


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory where it is installed: it saves a good part of the client's CPU time."""
    with suppress(ModuleNotFoundError):
        import uvloop

        return uvloop.new_event_loop
    return None


async def run_single(
    config: LoadConfig,
    view: ProgressView | None = None,
    clock: Clock | None = None,
    share: Share = WHOLE,
    begin: Begin | None = None,
) -> Run:
    """Run the share of `config` that is this process's. `begin` is awaited after the warm-up.

    Cancelled while sending (Ctrl-C), it returns the measurements until then. Raises `RunError` where the server cannot
    be reached or a warm-up request fails, `LoadConfigError` for bad settings.
    """
    clock = clock or Clock()
    async with open_caller(config, clock) as caller:
        watcher = Watcher(config, caller.model, clock.now)
        return await _measure(Driver(config.workload, caller, clock), config, view, share, begin, watcher)


@asynccontextmanager
async def open_caller(config: LoadConfig, clock: Clock, api: Api | None = None) -> AsyncIterator[Caller]:
    """Open what sends the requests, with what it has to know of the model. `api` replaces the target's over HTTP."""
    target, workload = config.target, config.workload
    check_extras(target.api, workload)
    if target.api in (ApiKind.GRPC_INFER, ApiKind.GRPC_STREAM):
        from sluice.load.grpc_calls import GrpcCaller

        if target.model is None:
            raise LoadConfigError(f"{target.api}: name the model with --model")
        async with GrpcCaller(target, workload, target.model, clock) as grpc_caller:
            yield grpc_caller
        return
    pool = ConnectionPool(target.url, clock.now)
    try:
        model = await find_model(pool, config)
        api = api or make_api(target.api)
        api.keeps_answers = needs_answers(workload)
        await api.prepare(partial(get, pool, target), model, workload)
        yield HttpCaller(target, workload, model, api, pool)
    finally:
        pool.close()


async def _measure(
    driver: Driver, config: LoadConfig, view: ProgressView | None, share: Share, begin: Begin | None, watcher: Watcher
) -> Run:
    prompts = prompt_source(config.target.api, config.workload)
    await _warm_up(driver, config.pace, planned_requests(config.workload, prompts, WARMUP_STREAM, share), share)
    requests = requests_for(config.pace, planned_requests(config.workload, prompts, share=share))
    if config.workload.turns.high == 1:
        driver.counts.num_planned = config.pace.num_requests
    async with watcher:
        start_s = None if begin is None else await begin()
        started_at, cpu_before_s = datetime.now(UTC).isoformat(timespec="seconds"), time.process_time()
        drive = _drive(driver, requests, config.pace, share, start_s)
        is_complete = await run_with_view(drive, view, driver.counts)
        client_cpu_s = time.process_time() - cpu_before_s
    num_events = driver.counts.num_token_events
    return Run(
        config=config,
        model=driver.caller.model,
        prompt_exactness=prompts.exactness,
        started_at=started_at,
        machine=read_machine_info(),
        event_loop=type(asyncio.get_running_loop()).__module__.partition(".")[0],
        was_interrupted=not is_complete,
        summary=summarize(driver.results, config.slo),
        client_cpu_s=client_cpu_s,
        client_cpu_us_per_event=client_cpu_s * 1e6 / num_events if num_events else None,
        results=driver.results,
        busiest_cpu_s=client_cpu_s,
        watched=watcher.watched,
    )


async def _drive(
    driver: Driver, requests: Iterator[PlannedRequest], pace: RequestPace, share: Share, start_s: float | None
) -> None:
    if pace.request_rate is not None or pace.replay_speed is not None:
        await driver.run_open(requests, pace, share, start_s)
        return
    assert pace.concurrency is not None, "Pace checks that one of the two is given"
    if start_s is not None:
        await driver.clock.sleep_until(start_s)
    begin_s = driver.clock.now() if start_s is None else start_s
    deadline_s = None if pace.duration_s is None else begin_s + pace.duration_s
    await driver.run_closed(requests, share.part_of(pace.concurrency), deadline_s)


async def run_with_view(drive: Coroutine[Any, Any, None], view: ProgressView | None, counts: LiveCounts) -> bool:
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


async def _warm_up(driver: Driver, pace: RequestPace, requests: Iterator[PlannedRequest], share: Share) -> None:
    if not pace.warmup:
        return
    warm = replace(driver, counts=LiveCounts(), results=[])
    alone = (replace(planned, later=()) for planned in first_requests(requests, pace.warmup))
    await warm.run_closed(alone, share.part_of(pace.concurrency or pace.warmup), deadline_s=None)
    for result in warm.results:
        if result.failure is not None:
            raise RunError(f"a warm-up request failed: {result.failure.label}: {result.failure.detail}")


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


async def find_model(pool: ConnectionPool, config: LoadConfig) -> str:
    """Return the model that is asked for: by default the first of the server's /v1/models."""
    target = config.target
    if target.model is not None:
        return target.model
    if target.api is ApiKind.RAG:
        return DEFAULT_PIPELINE
    try:
        return str((await get_json(pool, config, "/v1/models", _Models)).data[0]["id"])
    except (IndexError, KeyError):
        raise RunError(f"{target.url}/v1/models names no model: name it with --model") from None
    except RunError as error:
        hint = ": name the model with --model" if error.is_refusal else ""
        raise RunError(f"{error}{hint}", error.is_refusal) from None
