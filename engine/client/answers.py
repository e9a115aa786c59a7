"""Commands that change the engine itself, sent one at a time, and the engine's answers to them."""

import asyncio
from collections.abc import Callable

from sluice.engine.frames import AdapterOutcome, ChangeCommand, SleepOutcome
from sluice.errors import ErrorCode, SluiceError

Outcome = AdapterOutcome | SleepOutcome


class AnsweredCommands:
    """Used on one event loop. Callers hold `lock` while they ask and act on the answer."""

    def __init__(self, send: Callable[[ChangeCommand], None]) -> None:
        self._send = send
        self.lock = asyncio.Lock()
        self._name = ""
        """The adapter that the command under way is about; "" for one about sleep."""
        self._answer: asyncio.Future[Outcome] | None = None

    async def ask(self, command: ChangeCommand) -> None:
        """Wait for the answer, which comes, or the loss of the engine does. Raises the error that it brings."""
        self._name, self._answer = getattr(command, "name", ""), asyncio.get_running_loop().create_future()
        try:
            self._send(command)
            (await self._answer).check()
        finally:
            self._answer = None

    def is_awaited(self, outcome: Outcome) -> bool:
        """Whether it answers the command under way."""
        return self._answer is not None and self._name == getattr(outcome, "name", "")

    def take(self, outcome: Outcome) -> None:
        """Take the answer that is awaited."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(outcome)

    def fail(self, reason: str) -> None:
        """End the command under way, if there is one: no answer will come."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(SluiceError(ErrorCode.UNAVAILABLE, reason))
