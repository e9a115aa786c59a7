"""Drives servers with the load tool: a point is measured by starting its server and sending it requests. A `Plan` says
what a run of the tuner does."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sluice.load.config import ApiKind, LoadConfig, LoadConfigError, LoadTarget, RequestPace, Slo, Workload
from sluice.load.run import Run, RunError, run_load
from sluice.tuning.errors import TrialFailedError, TuneError
from sluice.tuning.figures import Figures, Goal, figures_of_run
from sluice.tuning.server import TrialServer, running_server
from sluice.tuning.space import Point, Value
from sluice.tuning.subject import Subject

CONCURRENCY, REQUEST_RATE = "concurrency", "request_rate"
"""The names of the load in a point: requests at a time, or requests a second."""
_MOST_WARMUP, _WARMUP_OF_RATE = 32, 4


@dataclass(frozen=True, slots=True)
class Drive:
    """The way in which servers are driven. `duration_s` is how long requests are sent in one trial."""

    api: ApiKind
    model: str | None
    workload: Workload
    load_name: str
    duration_s: float
    timeout_s: float
    slo: Slo | None

    def pace(self, load: Value) -> RequestPace:
        """Return when requests are sent at a load."""
        if self.load_name == CONCURRENCY:
            clients = int(load)
            return RequestPace(concurrency=clients, duration_s=self.duration_s, warmup=min(clients, _MOST_WARMUP))
        return RequestPace(request_rate=float(load), duration_s=self.duration_s, warmup=_WARMUP_OF_RATE)

    def config(self, url: str, load: Value, seed: int = 0) -> LoadConfig:
        """Return the configuration of a run. Other seeds send other requests of the same kind."""
        workload = replace(self.workload, seed=self.workload.seed + seed)
        target = LoadTarget(url, self.api, self.model, timeout_s=self.timeout_s)
        return LoadConfig(target, self.pace(load), workload, self.slo)


@dataclass(slots=True)
class LiveMeasurer:
    """Measures points on servers that it starts. One runs at a time, and stays for the next point with its settings."""

    subject: Subject
    drive: Drive
    folder: Path
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _server: TrialServer | None = None
    _settings: Point | None = None
    _num_started: int = 0

    async def measure(self, point: Point, seed: int = 0) -> Figures:
        """Measure a point. Raises TrialFailedError where its server does not start or requests fail, and no other point
        is measured on that server."""
        try:
            return await self._measure(await self._server_for(point), point[self.drive.load_name], seed)
        except TrialFailedError:
            await self.close()
            raise

    async def _measure(self, server: TrialServer, load: Value, seed: int) -> Figures:
        earlier = await self.subject.counters(server)
        try:
            run = await run_load(self.drive.config(server.url, load, seed))
        except RunError as error:
            raise TrialFailedError(str(error)) from None
        except LoadConfigError as error:
            raise TuneError(str(error)) from None
        if run.was_interrupted:
            raise asyncio.CancelledError
        _check_served(run)
        figures = figures_of_run(run) | await _memory(server)
        for prefix, counts in (await self.subject.counters(server)).items():
            figures |= counts.figures(earlier[prefix], prefix)
        return figures

    async def close(self) -> None:
        """Stop the server, if one runs."""
        self._server = self._settings = None
        await self._stack.aclose()

    async def _server_for(self, point: Point) -> TrialServer:
        settings = self.subject.space.settings_of(point)
        if self._server is None or self._settings != settings:
            await self.close()
            self._num_started += 1
            arguments = self.subject.arguments(point, self.folder / "repository")
            log = self.folder / "logs" / f"{self._num_started:05}.log"
            self._server = await self._stack.enter_async_context(running_server(arguments, log))
            self._settings = settings
        return self._server


def _check_served(run: Run) -> None:
    summary = run.summary
    if summary.num_failed:
        label, failure = next(iter(summary.failures.items()))
        failed = f"{summary.num_failed} of {summary.num_requests} requests failed"
        raise TrialFailedError(f"{failed}, the first by {label}: {failure.example[:200]}")
    if not summary.num_served:
        raise TrialFailedError("no request was served")


async def _memory(server: TrialServer) -> Figures:
    found = {"memory": await asyncio.to_thread(server.memory_bytes)}
    on_gpus = (await server.metrics()).values("nv_gpu_memory_used_bytes")
    return found | ({"gpu_memory": sum(on_gpus)} if on_gpus else {})


@dataclass(frozen=True, slots=True)
class TunePlan:
    """A plan: the subject, the goal, and how far to go. `num_checked` simulated points are measured on servers,
    `num_rounds` times the best and the default settings in turns."""

    subject: Subject
    drive: Drive
    goal: Goal
    folder: Path
    is_live: bool
    costs: Path | None
    num_trials: int
    num_checked: int
    num_rounds: int
    seed: int
    setup: dict[str, Any]
