"""The command `sluice top`: a screen of what a running server does, kept up to date while keys are read."""

import argparse
import asyncio
import os
import re
import sys
import termios
import tty
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sluice.cli.errors import reports_errors
from sluice.cli.server import RunningServer, ServerError, add_server_arguments, find_server
from sluice.cli.terminal import shorten_line
from sluice.gateway.options.option import OneLineParser, argument_type, seconds

Row = Mapping[str, Any]
HELP = "up/down select   c cancel   s sort   p pause   q quit"
MAX_ALERTS = 4
_BAR_CELLS = 24
_STYLES = {"fail": "bold red", "warn": "yellow", "note": "cyan"}


@dataclass(frozen=True)
class SortOrder:
    """An order of sequences."""

    name: str
    key: Callable[[Row], Any]


ORDERS = (
    SortOrder("age", lambda row: -row["age_s"]),
    SortOrder("generated", lambda row: -row["generated_tokens"]),
    SortOrder("prompt", lambda row: -row["prompt_tokens"]),
    SortOrder("tenant", lambda row: (row["tenant"], -row["age_s"])),
    SortOrder("state", lambda row: (row["state"], -row["age_s"])),
)


@dataclass
class View:
    """The choices of the user: the order, the selected generation, and whether the screen stands still."""

    order: int = 0
    selected: str = ""
    """Id of the selected generation; "" for none."""
    is_paused: bool = False
    message: str = ""

    def sort(self, sample: Row) -> list[Row]:
        """Return the open generations in the chosen order."""
        return sorted(sample["sequences"]["items"], key=ORDERS[self.order].key)

    def move(self, sample: Row, step: int) -> None:
        """Select the generation that is so many rows below the selected one."""
        ids = [row["id"] for row in self.sort(sample)]
        if not ids:
            self.selected = ""
            return
        at = ids.index(self.selected) + step if self.selected in ids else 0
        self.selected = ids[max(0, min(len(ids) - 1, at))]


def draw(sample: Row, view: View, num_lines: int | None = None, *, has_keys: bool = False) -> Group:
    """Draw a sample. Sequences that find no room in `num_lines` are counted; None: there is room for all."""
    parts: list[RenderableType] = [_headline(sample, view), _rates(sample), _latencies(sample), _engines(sample)]
    alerts = _alerts(sample["alerts"])
    used = 5 + len(sample["engines"]) + len(alerts) + has_keys + bool(view.message)
    room = None if num_lines is None else max(1, num_lines - used - 3)
    parts += [*alerts, _sequences(view, sample, room)]
    if view.message:
        parts.append(Text(view.message, style="bold"))
    if has_keys:
        parts.append(Text(HELP, style="dim", no_wrap=True))
    return Group(*parts)


def _headline(sample: Row, view: View) -> Text:
    server = sample["server"]
    style = "bold green" if server["state"] == "ready" else "bold red"
    line = Text.assemble("sluice ", (str(server["version"]), "bold"), "  ", (server["state"], style), no_wrap=True)
    if server["reason"]:
        line.append(f" ({shorten_line(server['reason'], 80)})", style="red")
    line.append(f"  up {_duration(server['uptime_s'])}  pid {server['pid']}", style="dim")
    if view.is_paused:
        line.append("  PAUSED", style="bold yellow")
    return line


def _rates(sample: Row) -> Text:
    rates = sample["throughput"]
    shown = (
        (f"{rates['generated_tokens_per_s']:.0f}", "generated/s"),
        (f"{rates['prompt_tokens_per_s']:.0f}", "prompt/s"),
        (f"{rates['cached_tokens_per_s']:.0f}", "cached/s"),
        (f"{rates['requests_per_s']:.1f}", "requests/s"),
        (str(rates["running"]), "running"),
        (str(rates["waiting"]), "waiting"),
        (str(rates["open_streams"]), "open"),
    )
    return _pairs("tokens ", shown)


def _latencies(sample: Row) -> Text:
    latency, shown = sample["latency"], []
    for name, title in (("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("queue_ms", "queue")):
        found = latency[name]
        values = "/".join("-" if found[each] is None else f"{found[each]:.0f}" for each in ("p50", "p90", "p99"))
        shown.append((values, f"{title} ms"))
    return _pairs(f"p50/90/99 in {latency['window_s']:.0f} s ", shown)


def _pairs(title: str, shown: Iterable[tuple[str, str]]) -> Text:
    line = Text(title, style="dim", no_wrap=True)
    for value, name in shown:
        line.append(f" {value}", style="bold not dim").append(f" {name} ")
    return line


def _engines(sample: Row) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for title in ("ENGINE", "STATE"):
        table.add_column(title, no_wrap=True, max_width=28)
    for title in ("RUN", "WAIT", "TOK/S", "STEP/S", "BUSY"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("KV BLOCKS (used, reserved, of all)", no_wrap=True)
    for each in sample["engines"]:
        name = f"{each['model']}/{each['replica']}" if each["replica"] else each["model"]
        blocks = each["blocks"]
        style = "green" if each["state"] == "serving" else "bold red"
        table.add_row(
            escape(name),
            Text(each["state"], style=style),
            str(each["running"]),
            str(each["waiting"]),
            f"{each['generated_tokens_per_s']:.0f}",
            f"{each['steps_per_s']:.0f}",
            f"{each['busy']:.0%}",
            _bar(blocks["used"], blocks["reserved"], blocks["total"]),
        )
    return table


def _bar(used: int, reserved: int, total: int) -> Text:
    """Draw the share of `total` blocks that are used, and that are reserved beyond those."""
    filled = -(-used * _BAR_CELLS // total) if total else 0
    promised = max(-(-reserved * _BAR_CELLS // total) if total else 0, filled)
    bar = Text("█" * filled, style="green").append("▒" * (promised - filled), style="yellow")
    bar.append("·" * (_BAR_CELLS - promised), style="dim")
    return bar.append(f" {used}, {reserved} of {total}", style="default")


def _alerts(alerts: Sequence[Row]) -> list[Text]:
    return [
        Text.assemble(
            (f"{each['level']} ", _STYLES.get(each["level"], "default")),
            shorten_line(f"{each['subject']}: {each['text']}", 300),
            no_wrap=True,
            overflow="ellipsis",
        )
        for each in alerts[:MAX_ALERTS]
    ]


def _sequences(view: View, sample: Row, room: int | None) -> RenderableType:
    rows, total = view.sort(sample), sample["sequences"]["total"]
    shown = _around(rows, view.selected, room)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("ID", no_wrap=True, min_width=20)
    for title in ("MODEL", "TENANT", "STATE"):
        table.add_column(title, no_wrap=True, max_width=20)
    for title in ("AGE", "PROMPT", "GENERATED"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in shown:
        table.add_row(
            row["id"],
            escape(shorten_line(row["model"], 20)),
            escape(shorten_line(row["tenant"] or "-", 20)),
            row["state"],
            f"{row['age_s']:.1f} s",
            str(row["prompt_tokens"]),
            f"{row['generated_tokens']}/{row['max_tokens']}",
            style="reverse" if row["id"] == view.selected else None,
        )
    rest = total - len(shown)
    more = Text(f"sorted by {ORDERS[view.order].name}; {total} open, {rest} not shown", style="dim", no_wrap=True)
    return Group(table, more)


def _around(rows: list[Row], selected: str, room: int | None) -> list[Row]:
    """Return the rows that fit into the room, the selected one among them."""
    if room is None or len(rows) <= room:
        return rows
    at = next((i for i, row in enumerate(rows) if row["id"] == selected), 0)
    first = max(0, at - room + 1)
    return rows[first : first + room]


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


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


@reports_errors("sluice top")
def command(argv: list[str]) -> int:
    """Show the activity of a running server: tokens, latencies, engines, KV blocks, sequences."""
    arguments = _parse(argv)
    server, console = find_server(arguments.url, arguments.api_key), Console()
    if arguments.once or not (sys.stdin.isatty() and console.is_terminal):
        console.print(draw(asyncio.run(_ask_once(server, arguments.interval)), View()))
    else:
        asyncio.run(_show(server, arguments.interval, console))
    return 0


async def _show(server: RunningServer, interval_s: float, console: Console) -> None:
    await Top(server, interval_s, console).run()


async def _ask_once(server: RunningServer, interval_s: float) -> dict[str, Any]:
    async with server:
        return await server.sample_once(interval_s)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = OneLineParser(prog="sluice top", usage="sluice top [OPTIONS] [URL]", description=_OVERVIEW, epilog=_EPILOG)
    add_server_arguments(parser)
    parser.add_argument(
        "--interval",
        type=argument_type(seconds(_SHORTEST_S)),
        default=1.0,
        metavar="SECONDS",
        help="seconds from one sample to the next, 0.25 to 60. Default: 1",
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end, as where there is no terminal")
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
