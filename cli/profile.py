"""The command `sluice profile`: has a running server record what it does, for Perfetto."""

import argparse
import asyncio
import sys
from pathlib import Path

from sluice.cli.errors import reports_errors
from sluice.cli.server import RunningServer, add_server_arguments, find_server
from sluice.gateway.options.option import OneLineParser, argument_type, number

_EPILOG = """\
examples:
  sluice profile --seconds 10 --output trace.json
  sluice profile http://10.0.0.5:8000 --api-key KEY

Open the file at https://ui.perfetto.dev or chrome://tracing: engine steps with their parts and batches, tasks of the
gateway's event loop and how late it is, and the requests. The key needs the group admin.
Exit codes: 0 when done, 1 where the server could not be recorded, 2 for a bad option.
"""


@reports_errors("sluice profile", OSError)
def command(argv: list[str]) -> int:
    """Record engine steps and gateway tasks of a running server into a Perfetto trace."""
    arguments = _parser().parse_args(argv)
    server = find_server(arguments.url, arguments.api_key)
    sys.stderr.write(f"recording {server.url} for {arguments.seconds:g} s\n")
    num_bytes = arguments.output.write_bytes(asyncio.run(_record(server, arguments.seconds)))
    sys.stdout.write(f"{arguments.output}: {num_bytes} bytes; open it at https://ui.perfetto.dev\n")
    return 0


async def _record(server: RunningServer, seconds: float) -> bytes:
    async with server:
        return await server.record_profile(seconds)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="sluice profile", description=command.__doc__, epilog=_EPILOG)
    add_server_arguments(parser)
    parser.add_argument(
        "--seconds",
        type=argument_type(number(0, 60, "seconds", is_above=True)),
        default=10.0,
        help="how long to record (default: 10)",
    )
    parser.add_argument("--output", type=Path, default=Path("trace.json"), help="the file (default: trace.json)")
    return parser
