"""The command `sluice profile`: has a running server record what it does, for Perfetto."""

import argparse
import sys
from pathlib import Path

import httpx

from sluice.cli.loopback import is_loopback
from sluice.gateway.options.config import read_client_options
from sluice.gateway.options.option import FAILED, USAGE_ERROR, OneLineParser, OptionError

_EPILOG = """\
examples:
  sluice profile --seconds 10 --output trace.json
  sluice profile http://10.0.0.5:8000 --api-key KEY

Open the file at https://ui.perfetto.dev or chrome://tracing: engine steps with their parts and batches, tasks of the
gateway's event loop and how late it is, and the requests. The key needs the group admin.
Exit codes: 0 when done, 1 where the server could not be recorded, 2 for a bad option.
"""
_MORE_S = 30.0
"""How much longer than the recording an answer may take."""


def command(argv: list[str]) -> int:
    """Record engine steps and gateway tasks of a running server into a Perfetto trace."""
    arguments = _parser().parse_args(argv)
    flags = {"--url": arguments.url} if arguments.url else {}
    if arguments.api_key:
        flags["--api-key"] = arguments.api_key
    try:
        options = read_client_options(flags)
        sys.stderr.write(f"recording {options.url} for {arguments.seconds:g} s\n")
        num_bytes = _record(options.url, options.api_key, arguments.seconds, arguments.output)
    except OptionError as error:
        return _fail(str(error), USAGE_ERROR)
    except (httpx.HTTPError, OSError, _RefusedError) as error:
        return _fail(str(error) or type(error).__name__, FAILED)
    sys.stdout.write(f"{arguments.output}: {num_bytes} bytes; open it at https://ui.perfetto.dev\n")
    return 0


class _RefusedError(Exception):
    """The server's reason for not recording."""


def _record(url: str, api_key: str | None, seconds: float, output: Path) -> int:
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    address = f"{url}/v1/admin/profile"
    answer = httpx.post(
        address,
        params={"seconds": seconds},
        headers=headers,
        timeout=seconds + _MORE_S,
        trust_env=not is_loopback(url),
    )
    if not answer.is_success:
        raise _RefusedError(_reason(answer, url))
    return output.write_bytes(answer.content)


def _reason(answer: httpx.Response, url: str) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{url} is no server of Sluice that records profiles: it answered with status {answer.status_code}"


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 60:
        raise argparse.ArgumentTypeError("must be a number of seconds above 0, at most 60")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="sluice profile",
        description=command.__doc__,
        epilog=_EPILOG,
    )
    parser.add_argument("url", nargs="?", help="the server; default: that of SLUICE_URL, or http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=_seconds, default=10.0, help="how long to record (default: 10)")
    parser.add_argument("--output", type=Path, default=Path("trace.json"), help="the file (default: trace.json)")
    parser.add_argument("--api-key", help="a key of the group admin; default: that of the environment")
    return parser


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"sluice profile: {message}\n")
    return code
