"""Steps of a tuning that keep what a user is told."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from sluice.tuning.steps import ConsoleSteps
from sluice.tuning.trials import Trial


class HeardSteps(ConsoleSteps):
    """Keeps the lines that a user is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def note(self, line: str) -> None:
        pass

    @asynccontextmanager
    async def counting(self, noun: str, num_done: int, num_planned: int) -> AsyncIterator[Callable[[Trial], None]]:
        yield lambda trial: None
