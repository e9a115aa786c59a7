"""Replays a workload through an executor and records what was predicted for each request, and what came."""

import heapq
import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.figures import BenchmarkError
from benchmarks.predicted_wait.workloads import VOCABULARY, Arrival
from sluice.engine.config import EngineConfig
from sluice.engine.forecast.wait import WaitForecast
from sluice.engine.frames import Cancel, Command, StepFrame, Submit
from sluice.engine.loop.executor import InflightExecutor
from sluice.engine.loop.sequences import Intake
from sluice.engine.runners.base import Runner
from sluice.engine.scheduling.admission import Backlog
from sluice.engine.sequence import QueuedSequence
from sluice.engine.sequence import Sequence as EngineSequence
from sluice.engine.types import EngineInfo, FinishReason, GenerateRequest, SamplingParams
from sluice.errors import ErrorCode, SluiceError

MAX_LATENCY_S = 0.05
"""Seconds by which a client may come back later than it was told to."""


class Clock(Protocol):
    """The time of a trial, in seconds."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


@dataclass(slots=True)
class Outcome:
    """The prediction and the fate of a request. Times are seconds from its submit, None for what did not happen."""

    arrival: Arrival
    submitted_at: float = 0.0
    """The time of its last submit, in seconds of the clock."""
    first_submitted_at: float = math.nan
    predicted_s: float = 0.0
    is_refused: bool = False
    """Whether its deadline was found too early at submit; an exempt request is served all the same."""
    waited_s: float | None = None
    """Seconds from its submit to its admission."""
    finished_s: float | None = None
    """The time of its last token."""
    num_output: int = 0
    told_s: list[float] = field(default_factory=list)
    """The `Retry-After` of each time that it found the queue full."""

    @property
    def is_in_time(self) -> bool:
        """Whether the request met its deadlines."""
        has_started = self.waited_s is not None and self.arrival.timeout_s is None
        return has_started or self.finished_s is not None


class Trial:
    """Replays on one engine, which is cold at first."""

    def __init__(self, runner: Runner, config: EngineConfig, clock: Clock) -> None:
        self._clock = clock
        self._executor = InflightExecutor(runner, config, self.receive, self._take, clock.now)
        # The executor keeps only sums of predictions and waits.
        intake = _RecordingIntake(self, self._executor.info, config, clock.now)
        self._executor._intake = self._executor._sequences._intake = intake
        self.outcomes: list[Outcome] = []
        self._due: list[tuple[float, int, Command]] = []
        self._num_open = 0
        self._rng = random.Random(0)

    def run(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        """Replay the arrivals from now on. Returns their outcomes in the same order."""
        started, first = self._clock.now(), len(self.outcomes)
        for number, arrival in enumerate(arrivals, first):
            self.outcomes.append(Outcome(arrival))
            heapq.heappush(self._due, (started + arrival.at_s, number, Submit(number, _request(number, arrival))))
        self._num_open = len(arrivals)
        while self._num_open:
            self._executor.step()
        self._due.clear()
        self._executor.check_invariants()
        return self.outcomes[first:]

    def receive(self, timeout_s: float) -> list[Command]:
        """Return the commands that are due, for the executor."""
        if timeout_s > 0:
            until_s = self._due[0][0] - self._clock.now() if self._due else timeout_s
            self._clock.sleep(min(max(until_s, 0.0), timeout_s))
        commands: list[Command] = []
        while self._due and self._due[0][0] <= self._clock.now():
            commands.append(heapq.heappop(self._due)[2])
        return commands

    def _take(self, frame: StepFrame) -> None:
        now = self._clock.now()
        for failure in frame.failures:
            if failure.code is ErrorCode.OVERLOADED and failure.retry_after_s is not None:
                self._retry(now, failure.stream_id, math.ceil(failure.retry_after_s))
                continue
            if failure.code is not ErrorCode.DEADLINE:
                raise BenchmarkError(f"a request failed: {failure.message}")
            self._num_open -= 1
        for event in frame.events:
            outcome = self.outcomes[event.stream_id]
            outcome.num_output += len(event.token_ids)
            is_complete = outcome.num_output >= min(outcome.arrival.length, outcome.arrival.max_tokens)
            has_ended = event.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}
            if (is_complete or has_ended) and outcome.finished_s is None:
                outcome.finished_s = now - outcome.submitted_at
            if is_complete and event.finish_reason is None:
                self._cancel_at(now, event.stream_id)  # as the gateway does at a stop string
            self._num_open -= event.finish_reason is not None

    def _retry(self, now: float, number: int, retry_after_s: float) -> None:
        """Send a refused request again when it was told to, in the whole seconds of HTTP."""
        outcome = self.outcomes[number]
        outcome.told_s.append(retry_after_s)
        at = now + retry_after_s + self._rng.uniform(0.0, MAX_LATENCY_S)
        heapq.heappush(self._due, (at, number, Submit(number, _request(number, outcome.arrival))))

    def begin(self, stream_id: int) -> Outcome:
        """Return the outcome of a request that is submitted now."""
        outcome = self.outcomes[stream_id]
        outcome.submitted_at = self._clock.now()
        if math.isnan(outcome.first_submitted_at):
            outcome.first_submitted_at = outcome.submitted_at
        if outcome.arrival.patience_s != math.inf:
            self._cancel_at(outcome.submitted_at + outcome.arrival.patience_s, stream_id)
        return outcome

    def _cancel_at(self, at: float, stream_id: int) -> None:
        heapq.heappush(self._due, (at, stream_id, Cancel(stream_id)))


class _RecordingIntake(Intake):
    """Records what is predicted at each submit, and takes exempt requests even if they would be refused."""

    def __init__(self, trial: Trial, info: EngineInfo, config: EngineConfig, clock: Callable[[], float]) -> None:
        super().__init__(info, config, clock)
        self.forecast = _RecordingForecast(trial, info, clock)
        self._trial = trial

    def admit_to_queue(
        self,
        sequence: EngineSequence,
        running: Collection[QueuedSequence],
        free_blocks: int,
        now: float,
        *,
        backlog: Backlog[EngineSequence],
        was_accepted: bool,
        most_wait_s: float | None = None,
    ) -> None:
        outcome = self._trial.begin(sequence.stream_id)
        try:
            super().admit_to_queue(sequence, running, free_blocks, now, backlog=backlog, was_accepted=was_accepted)
        except SluiceError as error:
            if error.code is ErrorCode.OVERLOADED:
                raise
            outcome.is_refused = True
            if not outcome.arrival.is_exempt:
                raise
            super().admit_to_queue(sequence, running, free_blocks, now, backlog=backlog, was_accepted=True)
        outcome.predicted_s = sequence.predicted_wait_s


class _RecordingForecast(WaitForecast):
    """Records the wait of each sequence when it is admitted."""

    def __init__(self, trial: Trial, info: EngineInfo, clock: Callable[[], float]) -> None:
        super().__init__(info, clock)
        self._trial = trial

    def record_wait(self, sequence: QueuedSequence, actual_s: float) -> None:
        super().record_wait(sequence, actual_s)
        self._trial.outcomes[sequence.stream_id].waited_s = actual_s


def _request(number: int, arrival: Arrival) -> GenerateRequest:
    *start, _ = arrival.prompt
    return GenerateRequest(
        request_id=str(number),
        prompt_token_ids=[*start, min(arrival.length, VOCABULARY - 1)],
        sampling=SamplingParams(max_tokens=arrival.max_tokens, temperature=0.0),
        tenant=arrival.tenant,
        priority=arrival.priority,
        queue_timeout_s=arrival.queue_timeout_s,
        timeout_s=arrival.timeout_s,
    )
