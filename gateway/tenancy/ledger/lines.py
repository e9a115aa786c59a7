"""Lines of logs, and where they go: standard output, or files that rotate."""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import gmtime, strftime
from typing import Protocol, TypeVar

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.record.batches import BatchWriter
from sluice.state.calendar_clock import CalendarClock

T = TypeVar("T")
log = logging.getLogger(__name__)

_FLUSH_S = 0.2
_MAX_WAITING = 20_000
"""Lines that wait for a slow disk or pipe; those that come then are lost, and counted."""
_LAST_WRITE_S = 2.0
_NUM_FILES = 8
"""A file is full at this part of what all may have together."""
_DAY_S = 86_400.0
_STDOUT = 1


class Sink(Protocol):
    """Where lines go. Called by one thread."""

    def write(self, lines: Sequence[str]) -> None:
        """Write lines, each with its end. Raises OSError."""


class LineWriter(BatchWriter[T], Collector):
    """Formats items and writes their lines."""

    def __init__(self, name: str, sink: Sink, format_line: Callable[[T], str]) -> None:
        """`format_line` returns a line without its end."""
        super().__init__(f"sluice-{name}-log", _MAX_WAITING, _MAX_WAITING, _FLUSH_S, _LAST_WRITE_S)
        self._log_name = name
        self._sink = sink
        self._format = format_line
        self._is_failing = False
        self._num_dropped = self._num_failed = 0

    def put(self, item: T) -> None:
        """Have an item written soon, with others."""
        if not self.offer(item):
            self._num_dropped += 1

    def write(self, items: list[T]) -> None:
        """Write the lines of items, or count them as lost."""
        try:
            self._sink.write([f"{self._format(each)}\n" for each in items])
            self._is_failing = False
        except Exception as error:
            if not self._is_failing:
                log.warning("the %s log cannot be written: %s; its lines are lost until it can", self._log_name, error)
            self._is_failing = True
            self._num_failed += len(items)

    def collect(self) -> Iterable[Metric]:
        """Return the number of lost lines."""
        name, lost = self._log_name, self._num_dropped + self._num_failed
        text = f"Lines of the {name} log that were lost: its disk or pipe was too slow, or could not be written."
        return (CounterMetricFamily(f"sluice_{name}_log_dropped_lines", text, lost),)


class StandardOutput:
    """Writes to standard output, as web servers do in containers.

    Not through `sys.stdout`: while a full pipe holds its lock, the process could not end.
    """

    def write(self, lines: Sequence[str]) -> None:
        """Write lines, however long their reader takes."""
        left = memoryview("".join(lines).encode())
        while left:
            left = left[os.write(_STDOUT, left) :]


class RotatingFile:
    """Writes to a file that is renamed when it is full or a day old. Files too old or too many are deleted.

    `requests.jsonl` becomes `requests.20261123T120000Z.jsonl`. Only the owner may read what clients sent.
    """

    def __init__(self, path: Path, max_bytes: int, max_age_days: int, clock: Callable[[], float] | None = None) -> None:
        """Keep at most `max_bytes` in all files together, each for `max_age_days` by `clock`."""
        self._path = path
        self._max_bytes = max_bytes
        self._max_age_s = max_age_days * _DAY_S
        self._clock = clock or CalendarClock()
        self._began = 0.0

    def write(self, lines: Sequence[str]) -> None:
        """Append lines to the file that is there, or to a new one."""
        content = "".join(lines).encode()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            status = self._path.stat()
            began = self._began or status.st_mtime
            if status.st_size + len(content) > self._max_bytes // _NUM_FILES or self._clock() - began > _DAY_S:
                self._rotate()
        if not self._path.exists():
            self._path.touch(0o600)
            self._began = self._clock()
        with self._path.open("ab") as file:
            file.write(content)

    def _rotate(self) -> None:
        now = self._clock()
        stamp, number = strftime("%Y%m%dT%H%M%SZ", gmtime(now)), 0
        while (target := self._rotated(f"{stamp}{f'-{number}' if number else ''}")).exists():
            number += 1
        self._path.rename(target)
        files = sorted(self._path.parent.glob(f"{self._path.stem}.*{self._path.suffix}"), key=_age_key)
        total = sum(each.stat().st_size for each in files)
        for each in files:
            status = each.stat()
            is_old = now - status.st_mtime > self._max_age_s
            if is_old or total > self._max_bytes * (_NUM_FILES - 1) // _NUM_FILES:
                each.unlink()
                total -= status.st_size

    def _rotated(self, stamp: str) -> Path:
        return self._path.with_name(f"{self._path.stem}.{stamp}{self._path.suffix}")


def _age_key(path: Path) -> tuple[float, str]:
    return path.stat().st_mtime, path.name
