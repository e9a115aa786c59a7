"""Shows on a terminal, or in lines of a log, how far a tuning has come."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.status import Status

from sluice.cli.progress import LINE_EVERY_S, show_progress
from sluice.tuning.figures import Goal, format_figure
from sluice.tuning.trials import Trial


@dataclass(slots=True)
class _CountedTrials:
    """A `CountedProgress` of trials."""

    noun: str
    num_done: int
    num_planned: int
    goal: Goal
    num_failed: int = 0
    best: float | None = None
    detail: str = ""

    def pace(self) -> str:
        name = self.goal.objective.figure
        best = (
            "none within the constraints yet" if self.best is None else f"best {name} {format_figure(name, self.best)}"
        )
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return f"{best}{failed}{f' ({self.detail})' if self.detail else ''}"

    def count(self, trial: Trial) -> None:
        self.num_done += 1
        self.detail = ""
        if trial.figures is None:
            self.num_failed += 1
        elif self.goal.is_met(trial.figures):
            value = trial.figures[self.goal.objective.figure]
            if self.best is None or self.goal.objective.is_better(value, self.best):
                self.best = value


@dataclass(slots=True)
class ConsoleSteps:
    """Shows on a console how far a tuning has come. A quiet one shows nothing."""

    console: Console
    goal: Goal
    _counted: _CountedTrials | None = None
    _status: Status | None = None
    _noted_at: float = field(default=-LINE_EVERY_S)

    def say(self, line: str) -> None:
        """Show a line that stays."""
        self.stop()
        self.console.print(line, markup=False, highlight=False)

    def note(self, line: str) -> None:
        """Show what is being done, until something else is."""
        if self._counted is not None:
            self._counted.detail = line
        elif self.console.is_terminal:
            if self._status is None:
                self._status = self.console.status(line)
                self._status.start()
            self._status.update(line)
        elif time.monotonic() - self._noted_at >= LINE_EVERY_S:
            self._noted_at = time.monotonic()
            self.console.print(line, markup=False, highlight=False)

    @asynccontextmanager
    async def counting(self, noun: str, num_done: int, num_planned: int) -> AsyncIterator[Callable[[Trial], None]]:
        """Show a count of trials. Yields what to tell of each."""
        self.stop()
        self._counted = counted = _CountedTrials(noun, num_done, num_planned, self.goal)
        try:
            async with show_progress(counted, self.console):
                yield counted.count
        finally:
            self._counted = None
        self.say(f"{counted.num_done} {noun}, {counted.pace()}")

    def stop(self) -> None:
        """Take the line of `note` off the terminal."""
        if self._status is not None:
            self._status.stop()
            self._status = None
