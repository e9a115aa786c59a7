"""Keeps lines that repeat from filling the log: some pass, and then one says how many did not."""

import copy
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import TextIO

WINDOW_S = 10.0
MOST = 5
"""Equal lines that pass within a window."""
MAX_KNOWN = 1000
"""Most different lines that are tracked at a time."""
_Key = tuple[str, int, str, str]


@dataclass
class _Known:
    """A line that has come. `last` is its record, of those that did not pass."""

    since: float
    num_passed: int = 0
    num_held: int = 0
    last: logging.LogRecord | None = None


class RepeatLimiter:
    """Decides which lines pass. Lines are equal where logger, level, message and request are. Any thread may use it."""

    def __init__(self, clock: Callable[[], float] = monotonic, find_request: Callable[[], str] | None = None) -> None:
        """`find_request` returns the id of the request that a line is about, "-" for none."""
        self._clock = clock
        self._find_request = find_request
        self._lock = Lock()
        self._known: dict[_Key, _Known] = {}
        """Repeated lines by the time of their first."""

    def take(self, record: logging.LogRecord) -> list[logging.LogRecord]:
        """Return the records to be written now: first those that say how often others were repeated."""
        request_id = getattr(record, "own_request_id", "") or (
            "" if self._find_request is None else self._find_request()
        )
        now, key = self._clock(), (record.name, record.levelno, record.getMessage(), request_id)
        with self._lock:
            due = list(self._end_windows(now))
            known = self._known.setdefault(key, _Known(now))
            if known.num_passed < MOST:
                known.num_passed += 1
                return [*due, record]
            known.num_held, known.last = known.num_held + 1, record
            return due

    def take_rest(self) -> list[logging.LogRecord]:
        """Return the pending reports of repeats, at the end of a log."""
        with self._lock:
            return list(self._end_windows(float("inf")))

    def _end_windows(self, now: float) -> Iterator[logging.LogRecord]:
        while self._known:
            key, known = next(iter(self._known.items()))
            if now - known.since < WINDOW_S and len(self._known) < MAX_KNOWN:
                return
            del self._known[key]
            if known.last is not None:
                yield _count(known.last, known.num_held, key[3])


def _count(record: logging.LogRecord, num_held: int, request_id: str) -> logging.LogRecord:
    told = copy.copy(record)
    told.own_request_id = request_id
    told.msg, told.args = "%s (repeated %d times)", (record.getMessage(), num_held)
    told.exc_info = told.exc_text = told.stack_info = None
    return told


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes lines to a stream; those that repeat are counted."""

    def __init__(self, stream: TextIO | None = None, find_request: Callable[[], str] | None = None) -> None:
        super().__init__(stream if stream is not None else sys.stderr)
        self._limiter = RepeatLimiter(find_request=find_request)
        self._has_failed = False

    def handle(self, record: logging.LogRecord) -> bool:
        passes = False
        for each in self._limiter.take(record):
            passes = super().handle(each)
        return passes

    def handleError(self, record: logging.LogRecord) -> None:
        """Report once that lines cannot be written, instead of a traceback for each of them."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # a line that cannot be formatted is a fault of ours
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            with suppress(OSError, ValueError):
                sys.stderr.write(f"the log cannot be written, and lines of it are lost: {error}\n")

    def close(self) -> None:
        for each in self._limiter.take_rest():
            super().handle(each)
        super().close()
