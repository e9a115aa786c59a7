"""Shows the progress of a command: a bar on a terminal, else a line every few seconds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

REDRAW_S = 0.25
LINE_EVERY_S = 5.0
_SPEED_WINDOW_S = 300.0
"""Seconds over which the bar averages the speed for its forecast of the end."""


class CountedProgress(Protocol):
    """Work whose parts are counted. `noun` names them in the plural; `pace` returns the speed and the failures."""

    @property
    def noun(self) -> str: ...

    @property
    def num_done(self) -> int: ...

    @property
    def num_planned(self) -> int: ...

    def pace(self) -> str: ...


@asynccontextmanager
async def show_progress(progress: CountedProgress, console: Console) -> AsyncIterator[None]:
    """Show the progress until the context ends."""
    task = asyncio.create_task(_show_bar(progress, console) if console.is_terminal else _print_lines(progress, console))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def _show_bar(progress: CountedProgress, console: Console) -> None:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{progress.noun}, {{task.description}}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, speed_estimate_period=_SPEED_WINDOW_S
    ) as display:
        bar = display.add_task("", completed=progress.num_done, total=progress.num_planned)
        while True:
            display.update(bar, completed=progress.num_done, total=progress.num_planned, description=progress.pace())
            display.refresh()
            await asyncio.sleep(REDRAW_S)


async def _print_lines(progress: CountedProgress, console: Console) -> None:
    while True:
        await asyncio.sleep(LINE_EVERY_S)
        line = f"{progress.num_done} of {progress.num_planned} {progress.noun}, {progress.pace()}"
        console.print(line, highlight=False)
