"""Measures a process's start: marks on the way, and a line for each with the time before it."""

import os
import time
from contextlib import suppress
from pathlib import Path

_START_TIME_FIELD = 22
"""The field of /proc/self/stat, from 1 on, with the process's start in clock ticks since the boot (proc(5))."""


class StartTimes:
    """The marks of one process, from its first instruction on."""

    def __init__(self) -> None:
        self._marks = [("", _process_start())]

    def mark(self, what: str) -> None:
        """Record that `what` is done now."""
        self._marks.append((what, time.monotonic()))

    def lines(self) -> list[str]:
        """Return a line for each mark, in order: milliseconds since the start, since the mark before, what was done."""
        start = self._marks[0][1]
        return [
            f"{1000 * (at - start):6.0f} ms (+{1000 * (at - before):.0f}) {what}"
            for (_, before), (what, at) in zip(self._marks, self._marks[1:], strict=False)
        ]


def _process_start() -> float:
    """Return the start of the process by `time.monotonic`; now if the system does not tell."""
    now = time.monotonic()
    with suppress(OSError, ValueError, IndexError, AttributeError):
        text = Path("/proc/self/stat").read_text()
        fields = text[text.rindex(")") + 2 :].split()  # behind the command's name, which may have spaces
        started_s = int(fields[_START_TIME_FIELD - 3]) / os.sysconf("SC_CLK_TCK")
        return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    return now


START_TIMES = StartTimes()
"""The start times of this process."""
