"""`sluice top`: its command line."""

import argparse
import asyncio
import sys
from typing import Any

from rich.console import Console

from sluice.cli.live.server import RunningServer, ServerError
from sluice.cli.top.screen import View, draw
from sluice.cli.top.watching import Top
from sluice.gateway.options.config import read_client_options
from sluice.gateway.options.option import FAILED, USAGE_ERROR, OneLineParser, OptionError, argument_type, seconds

_SHORTEST_S = 0.25
_OVERVIEW = """\
Show what a running server does: tokens a second, latencies, engines with their KV blocks, alerts, open sequences.
"""
_EPILOG = """\
keys:
  up, down     select a sequence (also k and j)
  c            cancel the selected one; its client gets an error
  s            sort by another column
  p            pause, and go on
  q            quit

examples:
  sluice top
  sluice top http://10.0.0.7:8000 --interval 0.5
  sluice top --once | head

Exit codes: 0, 1 for a server that cannot be asked, 2 for a bad option.
"""


def command(argv: list[str]) -> int:
    """Show what a running server does: tokens, latencies, engines, KV blocks, sequences."""
    arguments = _parse(argv)
    given = {"--url": arguments.url, "--api-key": arguments.api_key}
    try:
        options = read_client_options({flag: value for flag, value in given.items() if value is not None})
        server = RunningServer(options.url, options.api_key)
        console = Console()
        if arguments.once or not (sys.stdin.isatty() and console.is_terminal):
            sample = asyncio.run(_ask_once(server, arguments.interval))
            console.print(draw(sample, View()))
        else:
            asyncio.run(_show(server, arguments.interval, console))
    except OptionError as error:
        sys.stderr.write(f"sluice top: error: {error}\n")
        return USAGE_ERROR
    except ServerError as error:
        sys.stderr.write(f"sluice top: error: {error}\n")
        return FAILED
    return 0


async def _show(server: RunningServer, interval_s: float, console: Console) -> None:
    await Top(server, interval_s, console).run()


async def _ask_once(server: RunningServer, interval_s: float) -> dict[str, Any]:
    async with server:
        return await server.sample_once(interval_s)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = OneLineParser(prog="sluice top", usage="sluice top [OPTIONS] [URL]", description=_OVERVIEW, epilog=_EPILOG)
    parser.add_argument("url", nargs="?", metavar="URL", help="the server. Default: SLUICE_URL, else the local one")
    parser.add_argument(
        "--interval",
        type=argument_type(seconds(_SHORTEST_S)),
        default=1.0,
        metavar="SECONDS",
        help="seconds from one sample to the next, 0.25 to 60. Default: 1",
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end, as where there is no terminal")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="a key of the group admin, where the server asks for one. Better set SLUICE_API_KEY: every user of the "
        "machine can read a command line",
    )
    return parser.parse_args(argv)
