"""The live view of an ingestion: a bar on a terminal, a line now and then elsewhere."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cli.rag.tally import Tally

REDRAW_S = 0.25
LINE_EVERY_S = 5.0


@asynccontextmanager
async def shown(tally: Tally, console: Console) -> AsyncIterator[None]:
    """Show `tally` as long as the context lasts."""
    task = asyncio.create_task(_bar(tally, console) if console.is_terminal else _lines(tally, console))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def _bar(tally: Tally, console: Console) -> None:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("documents, {task.description}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        bar = progress.add_task("")
        while True:
            progress.update(bar, completed=tally.num_done, total=tally.num_planned, description=_speed(tally))
            progress.refresh()
            await asyncio.sleep(REDRAW_S)


async def _lines(tally: Tally, console: Console) -> None:
    while True:
        await asyncio.sleep(LINE_EVERY_S)
        console.print(f"{tally.num_done} of {tally.num_planned} documents, {_speed(tally)}", highlight=False)


def _speed(tally: Tally) -> str:
    failed = f", {len(tally.failures)} failed" if tally.failures else ""
    return f"{tally.chunks_per_s:,.0f} chunks/s{failed}"
