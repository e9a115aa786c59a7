"""The command `sluice logs`: shows the log of a running server, or of a file."""

import argparse
import asyncio
import logging
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import sleep, time
from typing import Any, TextIO

import orjson

from sluice.cli.errors import reports_errors
from sluice.cli.server import add_server_arguments, find_server
from sluice.cli.terminal import strip_control
from sluice.gateway.options.option import (
    OneLineParser,
    argument_type,
    integer,
    seconds,
)

_TEXT = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?) (?P<level>[A-Z]+) (?P<logger>\S+) "
    r"\[(?P<id>.*?)\] (?P<message>.*)"
)
_GATEWAY = "gateway"


@dataclass(frozen=True)
class LogEntry:
    """A line of a log with those that belong to it. `time` is in seconds since 1970, `process` the process that wrote
    the line, "" for a file, which does not name it."""

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
    """Selects lines of a log. `since` is in seconds since 1970."""

    level: int = logging.DEBUG
    request_id: str = ""
    since: float = 0.0

    def takes(self, entry: LogEntry) -> bool:
        """Return whether the line is selected."""
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


_LEVELS = ("debug", "info", "warning", "error", "critical")
_LOOK_S = 0.2
_OVERVIEW = """\
Show the log of a running server with its engines and workers, or of a log file in either format.
"""
_EPILOG = """\
examples:
  sluice logs                                             the last lines of the local server
  sluice logs http://10.0.0.7:8000 -f --level warning     and those that come
  sluice logs /var/log/sluice.log --request-id chatcmpl-7f3a
  sluice logs sluice.log --since 600 --json | jq .message

Exit codes: 0, 1 for a server that cannot be asked or a file that cannot be read, 2 for a bad option.
"""


@reports_errors("sluice logs", OSError)
def command(argv: list[str]) -> int:
    """Show the log of a running server, or of a file, and follow it."""
    arguments = _parse(argv)
    if _is_file(arguments.source):
        _show_file(Path(arguments.source), arguments)
    else:
        asyncio.run(_show_server(arguments))
    return 0


def _is_file(source: str | None) -> bool:
    return source is not None and "://" not in source


def _print(entry: LogEntry, arguments: argparse.Namespace) -> None:
    text = orjson.dumps(asdict(entry)).decode() if arguments.json else strip_control(entry.to_text())
    sys.stdout.write(text + "\n")


# -- a server


async def _show_server(arguments: argparse.Namespace) -> None:
    query = {"level": arguments.level, "limit": str(arguments.lines)}
    if arguments.request_id:
        query["request_id"] = arguments.request_id
    if arguments.since is not None:
        query["since_secs"] = f"{arguments.since:g}"
    async with find_server(arguments.source, arguments.api_key) as server:
        if not arguments.follow:
            for fields in await server.log_lines(query):
                _print(entry_of(fields), arguments)
            return
        async with aclosing(server.follow_log(query)) as lines:
            async for fields in lines:
                _print(entry_of(fields), arguments)
                sys.stdout.flush()


# -- a file


def _show_file(path: Path, arguments: argparse.Namespace) -> None:
    since = 0.0 if arguments.since is None else time() - arguments.since
    choice = LineChoice(logging.getLevelNamesMapping()[arguments.level.upper()], arguments.request_id, since)
    with path.open(errors="replace") as file:
        for entry in deque(filter(choice.takes, parse_lines(file)), maxlen=arguments.lines):
            _print(entry, arguments)
        if arguments.follow:
            sys.stdout.flush()
            for entry in filter(choice.takes, _follow(path, file)):
                _print(entry, arguments)
                sys.stdout.flush()


def _follow(path: Path, file: TextIO) -> Iterator[LogEntry]:
    """Yield entries that are added to the file, also to one that takes its place."""
    rest = ""
    while True:
        rest += file.read()
        whole, _, rest = rest.rpartition("\n")
        if whole:
            yield from parse_lines(whole.split("\n"))
        elif path.exists() and path.stat().st_size < file.tell():  # it was cut, or another is there
            file.seek(0)
            rest = ""
        else:
            sleep(_LOOK_S)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = OneLineParser(
        prog="sluice logs", usage="sluice logs [OPTIONS] [URL|FILE]", description=_OVERVIEW, epilog=_EPILOG
    )
    add_server_arguments(parser, "URL|FILE", "source")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with lines that come")
    parser.add_argument("--level", choices=_LEVELS, default="debug", help="the lowest level. Default: debug")
    parser.add_argument("--request-id", default="", metavar="ID", help="only lines about this request")
    parser.add_argument(
        "--since", type=argument_type(seconds(0)), metavar="SECONDS", help="only lines of the last so many seconds"
    )
    parser.add_argument(
        "-n", "--lines", type=argument_type(integer(0, 2000)), default=500, metavar="N", help="most lines. Default: 500"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each line")
    return parser.parse_args(argv)
