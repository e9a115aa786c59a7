"""Draws a sample of `/v1/admin/live` for a terminal."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sluice.cli.terminal import shorten_line

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
    """Draw how many of `total` blocks are used, and reserved beyond those."""
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
    """Return as many rows as there is room for, the selected one among them."""
    if room is None or len(rows) <= room:
        return rows
    at = next((i for i, row in enumerate(rows) if row["id"] == selected), 0)
    first = max(0, at - room + 1)
    return rows[first : first + room]


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
