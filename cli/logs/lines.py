"""Reads the lines of a log file, of text or of JSON, and chooses among them."""

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import orjson

_TEXT = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?) (?P<level>[A-Z]+) (?P<logger>\S+) "
    r"\[(?P<id>.*?)\] (?P<message>.*)"
)
_GATEWAY = "gateway"


@dataclass(frozen=True)
class LogEntry:
    """A line of a log with those that belong to it. `time` is in seconds since 1970, `process` the one that wrote the
    line, "" for a file, which does not say it."""

    time: float
    level: str
    logger: str
    request_id: str
    message: str
    process: str = ""

    def to_text(self) -> str:
        """Return the line as it stands in a log of text, with the time of this machine's zone, and with the name of
        every process but the gateway's."""
        at = datetime.fromtimestamp(self.time).isoformat(" ", "milliseconds")
        process = "" if self.process == _GATEWAY else self.process
        whose = " ".join(each for each in (process, self.request_id) if each not in ("", "-")) or "-"
        return f"{at} {self.level} {self.logger} [{whose}] {self.message}"


@dataclass(frozen=True)
class LineChoice:
    """Which lines are wanted. `since` is in seconds since 1970."""

    level: int = logging.DEBUG
    request_id: str = ""
    since: float = 0.0

    def takes(self, entry: LogEntry) -> bool:
        """Whether the line is wanted."""
        number = logging.getLevelNamesMapping().get(entry.level, logging.INFO)
        is_of_request = not self.request_id or entry.request_id == self.request_id
        return is_of_request and number >= self.level and entry.time >= self.since


def entry_of(fields: dict[str, Any]) -> LogEntry:
    """Return the entry of a server's object."""
    return LogEntry(
        float(fields["time"]),
        str(fields["level"]),
        str(fields["logger"]),
        str(fields["request_id"]),
        str(fields["message"]),
        str(fields.get("process", "")),
    )


def parse_lines(lines: Iterable[str]) -> Iterator[LogEntry]:
    """Yield the entries of a log. Lines that begin none, as those of a traceback, belong to the entry before; what
    stands before the first entry is left out."""
    pending: LogEntry | None = None
    for line in lines:
        text = line.rstrip("\n")
        entry = _parse_line(text)
        if entry is None and pending is not None:
            pending = replace(pending, message=f"{pending.message}\n{text}")
        elif entry is not None:
            if pending is not None:
                yield pending
            pending = entry
    if pending is not None:
        yield pending


def _parse_line(line: str) -> LogEntry | None:
    if line.startswith("{"):
        return _parse_json(line)
    found = _TEXT.fullmatch(line)
    if found is None:
        return None
    return LogEntry(_seconds(found["time"]), found["level"], found["logger"], found["id"], found["message"])


def _parse_json(line: str) -> LogEntry | None:
    try:
        fields = orjson.loads(line)
        more = [str(fields[name]) for name in ("exception", "stack") if fields.get(name)]
        message = "\n".join([str(fields["message"]), *more])
        return entry_of({**fields, "time": _seconds(fields["time"]), "message": message})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _seconds(text: str) -> float:
    """Return the time of a line: UTC where it ends in Z, else that of this machine."""
    if text.endswith("Z"):
        return datetime.fromisoformat(text.removesuffix("Z").replace(",", ".")).replace(tzinfo=UTC).timestamp()
    return datetime.fromisoformat(text.replace(",", ".")).timestamp()
