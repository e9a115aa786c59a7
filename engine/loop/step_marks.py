"""Records the steps of a loop while somebody wants that: the time of each part, and what the batch had."""

from collections.abc import Callable

from engine.frames import ProfiledStep, StepProfile
from engine.scheduling.planner import StepPlan
from engine.sequence import Sequence

_MAX_STEPS = 4096
"""Most steps that wait for a frame."""


class StepMarks:
    """The marks of the present step. Off, a mark costs a comparison."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until = 0.0
        self._parts: list[tuple[str, float]] = []
        self._started = self._last = 0.0
        self._steps: list[ProfiledStep] = []
        self.is_on = False

    def record(self, seconds: float) -> None:
        """Record the steps that begin in the next `seconds`."""
        self._until = self._clock() + seconds
        self.is_on = True

    def begin(self, now: float) -> None:
        """Begin a step."""
        if self.is_on:
            self.is_on = now < self._until
            self._parts, self._started, self._last = [], now, now

    def mark(self, part: str) -> None:
        """Note that a part has ended, which began with the end of the one before."""
        if self.is_on:
            now = self._clock()
            self._parts.append((part, now - self._last))
            self._last = now

    def end(self, plan: StepPlan[Sequence], num_running: int, num_waiting: int) -> None:
        """End the step, whose plan was not empty."""
        if not self.is_on or len(self._steps) >= _MAX_STEPS:
            return
        record = ProfiledStep(
            self._started,
            self._parts,
            num_decode=len(plan.decode),
            num_prefill_seqs=len(plan.prefill),
            num_prefill_tokens=sum(chunk.num_tokens for chunk in plan.prefill),
            num_admitted=len(plan.admitted),
            num_preempted=len(plan.preempted),
            num_running=num_running,
            num_waiting=num_waiting,
        )
        self._steps.append(record)

    def take(self) -> StepProfile | None:
        """Return the steps since the last call; None without any."""
        if not self._steps:
            return None
        steps, self._steps = self._steps, []
        return StepProfile(self._clock(), steps)
