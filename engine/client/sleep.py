"""Puts the engine of a client to sleep, and wakes it."""

from collections.abc import Callable

from sluice.engine.client.answers import AnsweredCommands
from sluice.engine.frames import Sleep, SleepMode, SleepOutcome, WakeUp


class SleepControl:
    """Knows whether the engine sleeps. A new engine in place of one that was lost asleep goes to sleep too."""

    def __init__(self, answers: AnsweredCommands, refuse_if_lost: Callable[[], None]) -> None:
        self._answers = answers
        self._refuse_if_lost = refuse_if_lost
        self.is_sleeping = False
        self._last = Sleep()

    async def sleep(self, level: int = 1, mode: SleepMode = "abort") -> None:
        """Stop generating; see `Sleep`. Raises the engine's error where it cannot."""
        async with self._answers.lock:
            self._refuse_if_lost()
            command = Sleep(level, mode)
            await self._answers.ask(command)
            self._last = command

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Go on, or give memory back to the parts that `tags` name; see `WakeUp`."""
        async with self._answers.lock:
            self._refuse_if_lost()
            await self._answers.ask(WakeUp(tags))

    def take(self, outcome: SleepOutcome) -> None:
        """Take an answer of the engine."""
        self.is_sleeping = outcome.is_sleeping
        if self._answers.is_awaited(outcome):
            self._answers.take(outcome)

    def commands_for_new_engine(self) -> list[Sleep]:
        """Return what puts a new engine to sleep, if the lost one slept. Its requests wait in its queue."""
        return [Sleep(self._last.level, "keep")] if self.is_sleeping else []
