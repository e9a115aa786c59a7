"""Shows a running server in the terminal, and obeys its keys."""

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
