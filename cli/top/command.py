"""`sluice top`: its command line, and the screen that it keeps up to date while keys are read."""

import argparse
import asyncio
import os
import re
import sys
import termios
import tty
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live

from sluice.cli.live.server import RunningServer, ServerError
from sluice.cli.top.screen import ORDERS, View, draw
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


RETRY_S = 1.0
_KEYS = {"\x1b[A": "k", "\x1b[B": "j", "\x1bOA": "k", "\x1bOB": "j", "\x03": "q"}
"""Keys that stand for others: the arrows, and an interrupt."""
_KEY = re.compile(r"\x1b[\[O][A-Z]|.", re.DOTALL)
_BEGUN = re.compile(r"\x1b[\[O]?$")
"""A key of which the rest is still to come."""


class Top:
    """The screen of one server. Belongs to the event loop."""

    def __init__(self, server: RunningServer, interval_s: float, console: Console) -> None:
        self._server = server
        self._interval_s = interval_s
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._view = View()
        self._sample: dict[str, Any] | None = None
        self._begun = ""
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Show samples until the user quits. Raises ServerError for a server that refuses, or never answered."""
        async with self._server:
            with self._live, _keys(self._on_keys):
                watching = asyncio.create_task(self._watch())
                ending = asyncio.create_task(self._ended.wait())
                try:
                    await asyncio.wait((watching, ending), return_when=asyncio.FIRST_COMPLETED)
                    if watching.done():
                        watching.result()
                finally:
                    for task in (watching, ending, *self._tasks):
                        task.cancel()
                    await asyncio.gather(watching, ending, *self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            try:
                async with aclosing(self._server.samples(self._interval_s)) as samples:
                    await self._follow(samples)
                self._tell("the server has ended its stream; trying again")
            except ServerError as error:
                if error.is_refusal or self._sample is None:
                    raise
                self._tell(f"{error}; trying again")
            await asyncio.sleep(RETRY_S)

    async def _follow(self, samples: AsyncGenerator[dict[str, Any], None]) -> None:
        async for sample in samples:
            if not self._view.is_paused:
                self._sample = sample
                self._draw()

    def _draw(self) -> None:
        if self._sample is not None:
            self._live.update(draw(self._sample, self._view, self._console.height, has_keys=True), refresh=True)

    def _tell(self, message: str) -> None:
        self._view.message = message
        self._draw()

    def _on_keys(self, typed: str) -> None:
        """Obey what one read has brought: several keys after a pause, or a part of one over a slow line."""
        typed = self._begun + typed
        begun = _BEGUN.search(typed)
        self._begun = begun[0] if begun else ""
        for key in _KEY.findall(typed.removesuffix(self._begun)):
            self._on_key(key)

    def _on_key(self, key: str) -> None:
        view = self._view
        view.message = ""
        match _KEYS.get(key, key):
            case "q":
                self._ended.set()
            case "p":
                view.is_paused = not view.is_paused
            case "s":
                view.order = (view.order + 1) % len(ORDERS)
            case "j" | "k" as direction if self._sample is not None:
                view.move(self._sample, 1 if direction == "j" else -1)
            case "c":
                self._begin_cancel()
        self._draw()

    def _begin_cancel(self) -> None:
        if not self._view.selected:
            self._view.message = "select a sequence first: up and down"
            return
        task = asyncio.create_task(self._cancel(self._view.selected))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _cancel(self, id_: str) -> None:
        try:
            await self._server.cancel_request(id_)
            self._tell(f"{id_} is cancelled")
        except ServerError as error:
            self._tell(str(error))


@contextmanager
def _keys(receive: Callable[[str], None]) -> Iterator[None]:
    """Pass each key to `receive` as it is typed; a terminal's own way of reading lines is off meanwhile."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def read() -> None:
        typed = os.read(descriptor, 64)
        receive(typed.decode(errors="ignore") if typed else "q")

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
