"""The live view of a run: a bar on a terminal, a line now and then elsewhere."""

import asyncio
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from load.stream import Tally

REDRAW_S = 0.5
"""Drawing costs CPU that the server on the same machine would use."""
LINE_EVERY_S = 5.0


async def watch(tally: Tally, console: Console) -> None:
    """Show `tally` until cancelled."""
    await (_watch_bar(tally, console) if console.is_terminal else _watch_lines(tally, console))


async def _watch_bar(tally: Tally, console: Console) -> None:
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=tally.num_planned)
        rate = _Rate()
        while True:
            progress.update(task, completed=tally.num_served + tally.num_failed, description=_line(tally, rate))
            progress.refresh()
            await asyncio.sleep(REDRAW_S)


async def _watch_lines(tally: Tally, console: Console) -> None:
    rate = _Rate()
    while True:
        await asyncio.sleep(LINE_EVERY_S)
        console.print(_line(tally, rate), highlight=False)


class _Rate:
    """Token events a second since it was last asked."""

    def __init__(self) -> None:
        self._at, self._count = time.perf_counter(), 0

    def since(self, count: int) -> float:
        now = time.perf_counter()
        rate = (count - self._count) / max(now - self._at, 1e-9)
        self._at, self._count = now, count
        return rate


def _line(tally: Tally, rate: _Rate) -> str:
    planned = "" if tally.num_planned is None else f" of {tally.num_planned}"
    failed = f", {tally.num_failed} failed" if tally.num_failed else ""
    return (
        f"{tally.num_served}{planned} served{failed}, {tally.num_in_flight} in flight, "
        f"{rate.since(tally.num_token_events):,.0f} token events/s"
    )
