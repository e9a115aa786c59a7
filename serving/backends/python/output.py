"""Logs what models print, line by line, with bounds on the length and the number of lines."""

import asyncio
import fcntl
import logging
import os
import re
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from sluice.log_relay import from_process

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 4096
"""A longer line is continued in the next one."""
MAX_LINES = 100
"""Most lines that are logged at once in a second, and most of the last ones of a second that had more."""
WINDOW_S = 1.0
_CHUNK_BYTES = 1 << 16
_FLOOD_SHARE = 0.2
"""Largest part of the event loop's time that goes to a model that prints without end."""
_LINE = re.compile(rb"[^\r\n]{1,%d}" % MAX_LINE_BYTES)  # progress bars end their lines with \r


class PrintedOutput:
    """Logs what a process and its children write to a pipe, with a name before each line. Event loop's thread only.

    Of a second with many lines it logs the first, the number left out, and the last: they say why a process ended.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._fd, self.far_fd = os.pipe()
        """`far_fd` is the end to write to. The caller closes it once the process has inherited it."""
        os.set_blocking(self._fd, False)
        self._rest = b""
        self._num_now = 0
        """Lines that have been logged in this second."""
        self._late: deque[bytes] = deque(maxlen=MAX_LINES)
        self._num_late = 0
        self._window: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to read."""
        self._pause = None
        self._loop.add_reader(self._fd, self._read)

    def close(self, *, is_failure: bool = False) -> None:
        """Log the rest of what was printed. The lines before a failure are logged even where no others are."""
        self._loop.remove_reader(self._fd)
        if self._pause is not None:
            self._pause.cancel()
        with suppress(BlockingIOError):
            self._receive(os.read(self._fd, fcntl.fcntl(self._fd, fcntl.F_GETPIPE_SZ)))
        self._receive(b"\n")
        os.close(self._fd)
        if self._window is not None:
            self._window.cancel()
        self._log_late(logging.ERROR if is_failure and not log.isEnabledFor(logging.INFO) else logging.INFO)

    def _read(self) -> None:
        started_s = time.perf_counter()
        with suppress(BlockingIOError):
            data = os.read(self._fd, _CHUNK_BYTES)
            self._receive(data)
            is_flood = self._num_late > MAX_LINES
            if is_flood or not data:
                self._loop.remove_reader(self._fd)
            if is_flood and data:
                pause_s = (time.perf_counter() - started_s) / _FLOOD_SHARE
                self._pause = self._loop.call_later(pause_s, self.start)

    def _receive(self, data: bytes) -> None:
        text = self._rest + data
        lines = _LINE.findall(text)
        self._rest = lines.pop() if lines and text[-1] not in b"\r\n" else b""
        if lines and self._window is None:
            self._window = self._loop.call_later(WINDOW_S, self._end_window)
        num_now = MAX_LINES - self._num_now if log.isEnabledFor(logging.INFO) else 0
        self._log(lines[:num_now], logging.INFO)
        self._num_now += len(lines[:num_now])
        self._late.extend(lines[num_now:])
        self._num_late += len(lines[num_now:])

    def _end_window(self) -> None:
        self._window = None
        if log.isEnabledFor(logging.INFO):
            self._log_late(logging.INFO)
        else:
            self._num_late = len(self._late)

    def _log_late(self, level: int) -> None:
        if num_left_out := self._num_late - len(self._late):
            text = "[%s] %d lines left out: more than %d a second"
            log.log(level, text, self._name, num_left_out, 2 * MAX_LINES, extra=from_process(self._name))
        self._log(self._late, level)
        self._late.clear()
        self._num_now = self._num_late = 0

    def _log(self, lines: Iterable[bytes], level: int) -> None:
        for line in lines:
            text = line.decode(errors="backslashreplace")
            log.log(level, "[%s] %s", self._name, text, extra=from_process(self._name))
