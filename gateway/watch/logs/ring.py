"""The last lines of the log, for administrators who look at a running server."""

import logging
from collections.abc import Callable
from threading import Lock

import msgspec

from sluice.engine.recent import Recent
from sluice.log_lines import message_of
from sluice.log_relay import LineCollector, cut_message
from sluice.log_repeats import RepeatLimiter

MAX_LINES = 2000


class LogLine(msgspec.Struct, frozen=True):
    """A line of the log, with the traceback in its message. `process` is the one that wrote it."""

    time: float
    level: str
    logger: str
    request_id: str
    message: str
    process: str = "gateway"


class LogRing(LineCollector):
    """Keeps the last lines that this process logs, and those that others send to it. Any thread may log."""

    def __init__(self, find_request: Callable[[], str] | None = None) -> None:
        """`find_request` returns the id of the request that a line is about."""
        super().__init__()
        self._limiter = RepeatLimiter(find_request=find_request)
        self._guard = Lock()
        self._lines: Recent[LogLine] = Recent(MAX_LINES)

    def handle(self, record: logging.LogRecord) -> bool:
        passes = False
        for each in self._limiter.take(record):
            passes = super().handle(each)
        return passes

    def emit(self, record: logging.LogRecord) -> None:
        message, process = cut_message(message_of(record)), getattr(record, "own_process", "gateway")
        self.add(LogLine(record.created, record.levelname, record.name, _request_id(record), message, process))

    def add(self, line: LogLine) -> None:
        """Add a line, which another process may have logged."""
        with self._guard:
            self._lines.append(line)

    def since(self, count: int) -> tuple[int, list[LogLine]]:
        """Return the number of all lines, and the kept ones after the first `count`."""
        with self._guard:
            return self._lines.count, self._lines.since(count)

    def warnings(self, most: int) -> list[LogLine]:
        """Return the last lines of the level warning and above, the oldest first."""
        found = [line for line in self.since(0)[1] if level_number(line.level) >= logging.WARNING]
        return found[-most:]


def level_number(level: str) -> int:
    """Return a level's number by its name; that of info for an unknown one."""
    return logging.getLevelNamesMapping().get(level, logging.INFO)


def _request_id(record: logging.LogRecord) -> str:
    return str(getattr(record, "request_id", "-"))


def find_ring() -> LogRing | None:
    """Return the ring of this process; None for one that keeps no lines, such as a command's."""
    return next((each for each in logging.root.handlers if isinstance(each, LogRing)), None)
