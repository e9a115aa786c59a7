"""A list of requests, each sent at its time, through an executor in this thread; what came of each, and when."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from benchmarks.figures import BenchmarkError
from engine.config import EngineConfig
from engine.forecast.wait import WaitForecast
from engine.frames import Command, StepFrame, Submit
from engine.loop.executor import InflightExecutor
from engine.runners.base import Runner
from engine.types import EngineInfo, EngineStats, GenerateRequest


class Sent(NamedTuple):
    """A request and when it is sent, in seconds from the start."""

    at_s: float
    request: GenerateRequest


@dataclass(slots=True)
class Story:
    """What came of a request. Times are seconds from the start; the wait in our own hands counts."""

    sent: Sent
    token_ids: list[int] = field(default_factory=list)
    event_times: list[float] = field(default_factory=list)
    """One an event that brought tokens."""

    @property
    def ttft_s(self) -> float:
        return self.event_times[0] - self.sent.at_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.event_times)]


class Wait(NamedTuple):
    """Between submit and admission."""

    predicted_s: float
    actual_s: float


class Replay(NamedTuple):
    """One run of a trace."""

    stories: list[Story]
    waits: list[Wait]
    """In the order of admission."""
    seconds: float
    stats: EngineStats

    @property
    def tokens_per_s(self) -> float:
        return sum(len(story.token_ids) for story in self.stories) / self.seconds

    def ttft_ms(self, percent: float) -> float:
        return percentile([story.ttft_s for story in self.stories], percent) * 1e3

    def itl_ms(self, percent: float) -> float:
        return percentile([gap for story in self.stories for gap in story.gaps_s], percent) * 1e3


def percentile(values: Iterable[float], percent: float) -> float:
    return float(np.percentile(list(values), percent))


class _Clock:
    """The trace as the executor's source of commands."""

    def __init__(self, trace: Sequence[Sent]) -> None:
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
            number, sent = self._due.popleft()
            commands.append(Submit(number, sent.request))
        return commands


class _NotedForecast(WaitForecast):
    """Keeps each wait beside its prediction."""

    def __init__(self, limits: EngineInfo) -> None:
        super().__init__(limits)
        self.waits: list[Wait] = []

    def record_wait(self, predicted_s: float, actual_s: float) -> None:
        super().record_wait(predicted_s, actual_s)
        self.waits.append(Wait(predicted_s, actual_s))


def replay(runner: Runner, config: EngineConfig, trace: Sequence[Sent]) -> Replay:
    """Run the trace to its end. Raises `BenchmarkError` where a request was refused or failed."""
    stories = [Story(sent) for sent in trace]
    clock = _Clock(trace)
    num_open = len(trace)

    def take(frame: StepFrame) -> None:
        nonlocal num_open
        now = clock.now
        if frame.failures:
            raise BenchmarkError(f"a request failed: {frame.failures[0].message}")
        for event in frame.events:
            story = stories[event.stream_id]
            story.token_ids += event.token_ids
            if event.token_ids:
                story.event_times.append(now)
            num_open -= event.finish_reason is not None

    executor = InflightExecutor(runner, config, clock, take)
    # The executor tells sums only; for quantiles each wait is noted where it is recorded.
    executor._intake.forecast = noted = _NotedForecast(executor.info)
    while num_open:
        executor.step()
    executor.check_invariants()
    return Replay(stories, noted.waits, clock.now, executor.stats())
