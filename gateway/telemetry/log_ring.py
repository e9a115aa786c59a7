"""The last lines of the log, for administrators who look at a running server."""

import logging
from collections.abc import Callable
from threading import Lock

import msgspec

from engine.recent import Recent
from sluice.log_lines import message_of

MAX_LINES = 2000
MAX_MESSAGE_CHARS = 4000
"""A longer message is cut, so that the lines have a bound."""


class LogLine(msgspec.Struct, frozen=True):
    """A line of the log. `process` is the one that wrote it: `gateway`, `engine` or `worker-1`."""

    time: float
    level: str
    logger: str
    request_id: str
    message: str
    process: str = "gateway"

    @property
    def number(self) -> int:
        """The level as the logging library numbers it."""
        return logging.getLevelNamesMapping().get(self.level, logging.INFO)


class LogRing(logging.Handler):
    """Keeps the last lines that this process logs, and those that others send to it. Any thread may log."""

    def __init__(self) -> None:
        super().__init__()
        self._guard = Lock()
        self._lines: Recent[LogLine] = Recent(MAX_LINES)
        self.on_line: Callable[[], None] | None = None
        """Called on the thread that logs, after each line."""

    def emit(self, record: logging.LogRecord) -> None:
        self.add(LogLine(record.created, record.levelname, record.name, _request_id(record), message_of(record)))

    def add(self, line: LogLine) -> None:
        """Add a line, perhaps of another process."""
        if len(line.message) > MAX_MESSAGE_CHARS:
            line = msgspec.structs.replace(line, message=line.message[:MAX_MESSAGE_CHARS] + " ...")
        with self._guard:
            self._lines.append(line)
        if self.on_line is not None:
            self.on_line()

    def since(self, count: int) -> tuple[int, list[LogLine]]:
        """Return how many lines there were, and those after the first `count`, as far as they are kept."""
        with self._guard:
            return self._lines.count, self._lines.since(count)

    def warnings(self, most: int) -> list[LogLine]:
        """Return the last lines of the level warning and above, the oldest first."""
        found = [line for line in self.since(0)[1] if line.number >= logging.WARNING]
        return found[-most:]


def _request_id(record: logging.LogRecord) -> str:
    return str(getattr(record, "request_id", "-"))


def find_ring() -> LogRing | None:
    """Return the ring of this process; None for one that keeps no lines, such as a command's."""
    return next((each for each in logging.root.handlers if isinstance(each, LogRing)), None)
