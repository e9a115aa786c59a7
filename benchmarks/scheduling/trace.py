"""Replays a trace of requests, each at its time, through an executor in this thread, and records their outcomes."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from benchmarks.figures import BenchmarkError
from sluice.engine.config import EngineConfig
from sluice.engine.forecast.wait import WaitForecast
from sluice.engine.frames import Command, StepFrame, Submit
from sluice.engine.loop.executor import InflightExecutor
from sluice.engine.runners.base import Runner
from sluice.engine.sequence import QueuedSequence
from sluice.engine.statistics import EngineStats
from sluice.engine.types import EngineInfo, GenerateRequest


class TimedRequest(NamedTuple):
    """A request, and the seconds from the start at which it is sent."""

    at_s: float
    request: GenerateRequest


@dataclass(slots=True)
class RequestOutcome:
    """The outcome of a request. Times are seconds from the start, and include waits in this process."""

    submitted: TimedRequest
    token_ids: list[int] = field(default_factory=list)
    event_times: list[float] = field(default_factory=list)
    """Times of the events with tokens."""

    @property
    def ttft_s(self) -> float:
        return self.event_times[0] - self.submitted.at_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.event_times)]


class Wait(NamedTuple):
    """The wait of a request between submission and admission."""

    predicted_s: float
    actual_s: float


class Replay(NamedTuple):
    """The result of replaying a trace."""

    outcomes: list[RequestOutcome]
    waits: list[Wait]
    """Waits in the order of admission."""
    seconds: float
    stats: EngineStats

    @property
    def tokens_per_s(self) -> float:
        return sum(len(outcome.token_ids) for outcome in self.outcomes) / self.seconds

    def ttft_ms(self, percent: float) -> float:
        return percentile([outcome.ttft_s for outcome in self.outcomes], percent) * 1e3

    def itl_ms(self, percent: float) -> float:
        return percentile([gap for outcome in self.outcomes for gap in outcome.gaps_s], percent) * 1e3


def percentile(values: Iterable[float], percent: float) -> float:
    return float(np.percentile(list(values), percent))


class _TraceCommands:
    """The executor's source of commands: the requests of a trace, each when it is due."""

    def __init__(self, trace: Sequence[TimedRequest]) -> None:
        self._due = deque(sorted(enumerate(trace), key=lambda item: item[1].at_s))
        self._started = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self._started

    def receive(self, timeout_s: float) -> list[Command]:
        if timeout_s > 0 and self._due:
            time.sleep(min(max(self._due[0][1].at_s - self.now, 0.0), timeout_s))
        commands: list[Command] = []
        while self._due and self._due[0][1].at_s <= self.now:
            number, timed = self._due.popleft()
            commands.append(Submit(number, timed.request))
        return commands


class _RecordingForecast(WaitForecast):
    """A forecast that keeps each wait beside its prediction."""

    def __init__(self, limits: EngineInfo, *, is_chunk_chosen: bool) -> None:
        super().__init__(limits, is_chunk_chosen=is_chunk_chosen)
        self.waits: list[Wait] = []

    def record_wait(self, sequence: QueuedSequence, actual_s: float) -> None:
        super().record_wait(sequence, actual_s)
        self.waits.append(Wait(sequence.predicted_wait_s, actual_s))


def replay(runner: Runner, config: EngineConfig, trace: Sequence[TimedRequest]) -> Replay:
    """Replay the trace to its end. Raises `BenchmarkError` where a request is rejected or fails."""
    outcomes = [RequestOutcome(timed) for timed in trace]
    commands = _TraceCommands(trace)
    num_open = len(trace)

    def take(frame: StepFrame) -> None:
        nonlocal num_open
        now = commands.now
        if frame.failures:
            raise BenchmarkError(f"a request failed: {frame.failures[0].message}")
        for event in frame.events:
            outcome = outcomes[event.stream_id]
            outcome.token_ids += event.token_ids
            if event.token_ids:
                outcome.event_times.append(now)
            num_open -= event.finish_reason is not None

    executor = InflightExecutor(runner, config, commands.receive, take)
    # The executor has only sums of waits; for quantiles each wait is kept where it is recorded.
    executor._intake.forecast = forecast = _RecordingForecast(executor.info, is_chunk_chosen=config.chooses_chunk)
    while num_open:
        executor.step()
    executor.check_invariants()
    return Replay(outcomes, forecast.waits, commands.now, executor.stats())
