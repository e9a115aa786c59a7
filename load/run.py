"""One whole run, of one client process or of several, for servers that are faster than one.

Each process sends its share of the requests. All begin at one moment of the machine's monotonic clock, which they have
in common, so that their results lie on one axis of time.
"""

import asyncio
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TypeVar

from sluice.load.callers import Clock
from sluice.load.config import ApiKind, LoadConfig, LoadConfigError
from sluice.load.connection import ConnectionPool, RunError, get_json
from sluice.load.shares import Share, shares_of
from sluice.load.single_run import (
    ProgressView,
    Run,
    find_model,
    loop_factory,
    read_machine_info,
    run_single,
    run_with_view,
)
from sluice.load.stream import LiveCounts
from sluice.load.summary import summarize
from sluice.load.watch.watcher import Watcher

COUNTS_INTERVAL_S = 0.25
"""Seconds between two reports of a process on its progress."""
START_DELAY_S = 0.1
"""Time from the decision to begin to the begin: long enough for every process to hear of it."""
END_S = 10.0
FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130
"""Exit codes of the commands, beside 0."""
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class _Ready:
    """A process has warmed up."""


@dataclass(frozen=True, slots=True)
class _Stop:
    """The run ends with what was measured until now."""


_Report = _Ready | LiveCounts | Run | Exception


async def run_in_processes(config: LoadConfig, view: ProgressView | None) -> Run:
    """Run `config` in processes of its own. Cancelled while sending, it returns the measurements until then."""
    if config.target.model is None and config.target.api not in (ApiKind.GRPC_INFER, ApiKind.GRPC_STREAM):
        config = replace(config, target=replace(config.target, model=await _find_model(config)))
    # Only this process watches the server.
    part = replace(config, num_processes=1, metrics_url=None, measures_energy=False)
    workers = [_Worker.start(part, share) for share in shares_of(config.pace, config.num_processes)]
    try:
        await asyncio.gather(*(worker.until_ready() for worker in workers))
        counts = LiveCounts(num_planned=config.pace.num_requests if config.workload.turns.high == 1 else None)
        async with Watcher(config, config.target.model or "", time.perf_counter) as watcher:
            begin_s = time.perf_counter() + START_DELAY_S
            for worker in workers:
                worker.begin(begin_s)
            is_complete = await run_with_view(_follow(workers, counts), view, counts)
            if not is_complete:
                for worker in workers:
                    worker.stop()
                await asyncio.gather(*(worker.until_ended() for worker in workers))
        return _merge(config, [worker.run for worker in workers], watcher, was_interrupted=not is_complete)
    finally:
        for worker in workers:
            worker.close()


async def _find_model(config: LoadConfig) -> str:
    pool = ConnectionPool(config.target.url, time.perf_counter)
    try:
        return await find_model(pool, config)
    finally:
        pool.close()


async def _follow(workers: "list[_Worker]", counts: LiveCounts) -> None:
    """Wait for the ends of all processes, and keep `counts` at the sum of theirs."""
    names = [each.name for each in fields(LiveCounts) if each.name != "num_planned"]

    def add_up() -> None:
        for name in names:
            setattr(counts, name, sum(getattr(worker.counts, name) for worker in workers))

    await asyncio.gather(*(worker.until_ended(add_up) for worker in workers))


def _merge(config: LoadConfig, runs: list[Run], watcher: Watcher, was_interrupted: bool) -> Run:
    results = sorted((result for run in runs for result in run.results), key=lambda result: result.ended_s)
    num_events = sum(len(result.event_times_s) for result in results)
    client_cpu_s = sum(run.client_cpu_s for run in runs)
    return replace(
        runs[0],
        config=config,
        results=results,
        summary=summarize(results, config.slo),
        client_cpu_s=client_cpu_s,
        client_cpu_us_per_event=client_cpu_s * 1e6 / num_events if num_events else None,
        busiest_cpu_s=max(run.client_cpu_s for run in runs),
        was_interrupted=was_interrupted or any(run.was_interrupted for run in runs),
        watched=watcher.watched,
    )


@dataclass(slots=True)
class _Worker:
    """Controls one process of the client."""

    process: BaseProcess
    connection: Connection
    counts: LiveCounts = field(default_factory=LiveCounts)
    _run: Run | None = None
    _reports: "asyncio.Queue[_Report]" = field(default_factory=asyncio.Queue)

    @classmethod
    def start(cls, config: LoadConfig, share: Share) -> "_Worker":
        # A new interpreter: a fork would have this one's event loop.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, config, share), daemon=True)
        process.start()
        theirs.close()
        worker = cls(process, ours)
        asyncio.get_running_loop().add_reader(ours.fileno(), worker._receive)
        return worker

    def _receive(self) -> None:
        try:
            self._reports.put_nowait(self.connection.recv())
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self.connection.fileno())
            self._reports.put_nowait(RunError("a process of the client ended unexpectedly: its error stands above"))

    async def _next_report(self) -> _Report:
        report = await self._reports.get()
        if isinstance(report, Exception):
            raise report
        return report

    async def until_ready(self) -> None:
        """Wait until it has warmed up. Raises what went wrong there."""
        while not isinstance(await self._next_report(), _Ready):
            pass

    async def until_ended(self, on_counts: Callable[[], None] = lambda: None) -> None:
        while self._run is None:
            report = await self._next_report()
            if isinstance(report, Run):
                self._run = report
            elif isinstance(report, LiveCounts):
                self.counts = report
                on_counts()

    @property
    def run(self) -> Run:
        assert self._run is not None, "its end was waited for"
        return self._run

    def begin(self, moment_s: float) -> None:
        self.connection.send(moment_s)

    def stop(self) -> None:
        with suppress(OSError):
            self.connection.send(_Stop())

    def close(self) -> None:
        """End the process: at once where it has not ended by itself."""
        asyncio.get_running_loop().remove_reader(self.connection.fileno())
        self.connection.close()
        if self._run is None:
            self.process.kill()
        self.process.join(END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def _work(connection: Connection, config: LoadConfig, share: Share) -> None:
    """Run a share of the requests in this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the first process, which stops the others
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(connection, config, share))


async def _serve(connection: Connection, config: LoadConfig, share: Share) -> None:
    begin: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def until_begun() -> float:
        connection.send(_Ready())
        return await begin

    async def report(counts: LiveCounts) -> None:
        while True:
            await asyncio.sleep(COUNTS_INTERVAL_S)
            connection.send(counts)

    running = asyncio.create_task(run_single(config, report, share=share, begin=until_begun))

    def receive() -> None:
        try:
            order = connection.recv()
        except (EOFError, OSError):  # the first process has ended
            order = _Stop()
            asyncio.get_running_loop().remove_reader(connection.fileno())
        if isinstance(order, float):
            begin.set_result(order)
        else:
            running.cancel()

    asyncio.get_running_loop().add_reader(connection.fileno(), receive)
    try:
        outcome: Run | Exception = await running
    except (RunError, LoadConfigError) as error:
        outcome = error
    except asyncio.CancelledError:  # stopped before the begin: nobody waits for a report
        return
    asyncio.get_running_loop().remove_reader(connection.fileno())
    with suppress(OSError):
        connection.send(_without_prompts(outcome) if isinstance(outcome, Run) else outcome)


def _without_prompts(run: Run) -> Run:
    """Return the run without its prompts, which would be most of what goes to the first process."""
    results = [replace(result, planned=replace(result.planned, prompt="")) for result in run.results]
    return replace(run, results=results)


def reports_errors(program: str) -> Callable[[Callable[[P], int]], Callable[[P], int]]:
    """Decorate the function that runs `program`: an error for the user is one line on standard error, and exit code 2;
    an interrupt is 130."""

    def decorate(run: Callable[[P], int]) -> Callable[[P], int]:
        @wraps(run)
        def reporting(arguments: P) -> int:
            try:
                return run(arguments)
            except (LoadConfigError, RunError) as error:
                sys.stderr.write(f"{program}: {error}\n")
                return USAGE_ERROR
            except KeyboardInterrupt:
                return INTERRUPTED

        return reporting

    return decorate


def run_blocking(config: LoadConfig, view: ProgressView | None = None) -> Run:
    """Run `config` in an event loop of its own."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(run_load(config, view))


async def run_load(config: LoadConfig, view: ProgressView | None = None, clock: Clock | None = None) -> Run:
    """Run `config`. Cancelled while sending (Ctrl-C), it returns the measurements until then.

    Raises `RunError` where the server cannot be reached or a warm-up request fails, `LoadConfigError` for bad
    settings. Several processes go by the machine's clock, whatever `clock` is.
    """
    if config.num_processes > 1:
        return await run_in_processes(config, view)
    return await run_single(config, view, clock)


__all__ = ["ProgressView", "Run", "RunError", "get_json", "read_machine_info", "run_blocking", "run_load"]
