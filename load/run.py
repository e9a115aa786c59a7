"""One whole run: find the model, warm up, send, measure."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import msgspec

from load.apis import dialect_of
from load.clock import Clock, RealClock
from load.config import LoadConfig, Pace
from load.connection import ConnectionPool, encode_request
from load.driver import Driver
from load.machine import Machine, this_machine
from load.prompts import prompt_source
from load.stream import PlannedRequest, RequestResult, Tally
from load.summary import Summary, summarize
from load.workload import WARMUP_STREAM, planned_requests, requests_for

Watch = Callable[[Tally], Coroutine[Any, Any, None]]
"""Shows a run's progress until it is cancelled."""


class RunError(Exception):
    """The run could not begin; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: what it was, what it measured, what measuring cost."""

    config: LoadConfig
    model: str
    prompt_exactness: str
    started_at: str
    machine: Machine
    event_loop: str
    was_interrupted: bool
    summary: Summary
    client_cpu_s: float
    """CPU time of this process during the run. Close to `summary.wall_s`, the client was the limit."""
    client_cpu_us_per_event: float | None
    results: list[RequestResult]


def run_blocking(config: LoadConfig, watch: Watch | None = None) -> Run:
    """`run_load` in an event loop of its own."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(run_load(config, watch))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: it takes a good part of the client's CPU time off."""
    with suppress(ModuleNotFoundError):
        import uvloop

        return uvloop.new_event_loop
    return None


async def run_load(config: LoadConfig, watch: Watch | None = None, clock: Clock | None = None) -> Run:
    """Run `config`. Cancelled while sending (Ctrl-C), it returns what was measured until then.

    Raises `RunError` where the server cannot be reached or a warm-up request fails, `ConfigError` for settings.
    """
    clock = clock or RealClock()
    pool = ConnectionPool(config.target.url, clock.now)
    try:
        model = config.target.model or await _first_model(pool, config)
        driver = Driver(config.target, config.workload, model, dialect_of(config.target.api), pool, clock)
        return await _measure(driver, config, watch)
    finally:
        pool.close()


async def _measure(driver: Driver, config: LoadConfig, watch: Watch | None) -> Run:
    prompts = prompt_source(config.target.api, config.workload)
    await _warm_up(driver, config.pace, planned_requests(config.workload, prompts, WARMUP_STREAM))
    requests = requests_for(config.pace, planned_requests(config.workload, prompts))
    driver.tally.num_planned = config.pace.num_requests
    started_at, cpu_before_s = datetime.now(UTC).isoformat(timespec="seconds"), time.process_time()
    is_whole = await _watched(_drive(driver, requests, config.pace), watch, driver.tally)
    client_cpu_s = time.process_time() - cpu_before_s
    num_events = driver.tally.num_token_events
    return Run(
        config=config,
        model=driver.model,
        prompt_exactness=prompts.exactness,
        started_at=started_at,
        machine=this_machine(),
        event_loop=type(asyncio.get_running_loop()).__module__.partition(".")[0],
        was_interrupted=not is_whole,
        summary=summarize(driver.results, config.slo),
        client_cpu_s=client_cpu_s,
        client_cpu_us_per_event=client_cpu_s * 1e6 / num_events if num_events else None,
        results=driver.results,
    )


async def _drive(driver: Driver, requests: Iterator[PlannedRequest], pace: Pace) -> None:
    if pace.request_rate is not None:
        await driver.run_open(requests, pace)
        return
    assert pace.concurrency is not None, "Pace checks that one of the two is given"
    deadline_s = None if pace.duration_s is None else driver.clock.now() + pace.duration_s
    await driver.run_closed(requests, pace.concurrency, deadline_s)


async def _watched(drive: Coroutine[Any, Any, None], watch: Watch | None, tally: Tally) -> bool:
    """Whether `drive` ran to its end rather than being cancelled; `watch` runs beside it."""
    watcher = asyncio.create_task(watch(tally)) if watch else None
    try:
        await drive
    except asyncio.CancelledError:
        return False
    finally:
        if watcher is not None:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher
    return True


async def _warm_up(driver: Driver, pace: Pace, requests: Iterator[PlannedRequest]) -> None:
    if not pace.warmup:
        return
    warm = replace(driver, tally=Tally(), results=[])
    await warm.run_closed(islice(requests, pace.warmup), pace.concurrency or pace.warmup, deadline_s=None)
    for result in warm.results:
        if result.failure is not None:
            raise RunError(f"a warm-up request failed: {result.failure.label}: {result.failure.detail}")


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


@dataclass(slots=True)
class _WholeBody:
    """Collects a response (a `connection.Receiver`)."""

    status: int = 0
    body: bytes = b""

    def on_status(self, status: int) -> None:
        self.status = status

    def on_body(self, piece: bytes, at: float) -> None:
        self.body += piece


async def _first_model(pool: ConnectionPool, config: LoadConfig) -> str:
    """The first of the server's /v1/models."""
    target, response = config.target, _WholeBody()
    try:
        async with asyncio.timeout(target.timeout_s):
            connection = await pool.acquire()
            await connection.exchange(encode_request("GET", target.url, "/v1/models", target.headers), response)
    except (OSError, TimeoutError) as error:
        raise RunError(f"cannot reach {target.url}: {error}") from error
    pool.release(connection)
    if response.status != 200:
        raise RunError(f"{target.url}/v1/models answers {response.status}: name the model with --model")
    try:
        return str(msgspec.json.decode(response.body, type=_Models).data[0]["id"])
    except (msgspec.DecodeError, IndexError, KeyError):
        raise RunError(f"{target.url}/v1/models names no model: name it with --model") from None
