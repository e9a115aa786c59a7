"""`sluice logs`: its command line."""

import argparse
import asyncio
import logging
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from time import sleep, time
from typing import TextIO

import orjson

from sluice.cli.live.server import RunningServer, ServerError
from sluice.cli.logs.lines import LineChoice, LogEntry, entry_of, parse_lines
from sluice.cli.terminal import strip_control
from sluice.gateway.options.config import read_client_options
from sluice.gateway.options.option import (
    FAILED,
    USAGE_ERROR,
    OneLineParser,
    OptionError,
    argument_type,
    integer,
    seconds,
)

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


def command(argv: list[str]) -> int:
    """Show the log of a running server, or of a file, and follow it."""
    arguments = _parse(argv)
    try:
        if _is_file(arguments.source):
            _show_file(Path(arguments.source), arguments)
        else:
            asyncio.run(_show_server(arguments))
    except OptionError as error:
        sys.stderr.write(f"sluice logs: error: {error}\n")
        return USAGE_ERROR
    except (ServerError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        sys.stderr.write(f"sluice logs: error: {error}\n")
        return FAILED
    return 0


def _is_file(source: str | None) -> bool:
    return source is not None and "://" not in source


def _print(entry: LogEntry, arguments: argparse.Namespace) -> None:
    text = orjson.dumps(asdict(entry)).decode() if arguments.json else strip_control(entry.to_text())
    sys.stdout.write(text + "\n")


# -- a server


async def _show_server(arguments: argparse.Namespace) -> None:
    given = {"--url": arguments.source, "--api-key": arguments.api_key}
    options = read_client_options({flag: value for flag, value in given.items() if value is not None})
    query = {"level": arguments.level, "limit": str(arguments.lines)}
    if arguments.request_id:
        query["request_id"] = arguments.request_id
    if arguments.since is not None:
        query["since_secs"] = f"{arguments.since:g}"
    async with RunningServer(options.url, options.api_key) as server:
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
    parser.add_argument("source", nargs="?", metavar="URL|FILE", help="Default: SLUICE_URL, else the local server")
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
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="a key of the group admin, where the server asks for one. Better set SLUICE_API_KEY: every user of the "
        "machine can read a command line",
    )
    return parser.parse_args(argv)
