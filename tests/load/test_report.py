import asyncio
import io

from rich.console import Console

from sluice.load.report import show_progress
from sluice.load.stream import LiveCounts


class FirstWrite(io.StringIO):
    """Sets an event at the first write."""

    def __init__(self) -> None:
        super().__init__()
        self.happened = asyncio.Event()

    def write(self, text: str) -> int:
        if text.strip():
            self.happened.set()
        return super().write(text)


def test_the_view_shows_the_live_counts() -> None:
    async def scenario() -> str:
        output = FirstWrite()
        tally = LiveCounts(num_planned=9, num_started=6, num_served=3, num_failed=1, num_token_events=50)
        watcher = asyncio.create_task(show_progress(tally, Console(file=output, force_terminal=True, width=120)))
        await output.happened.wait()
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        return output.getvalue()

    assert "3 of 9 served, 1 failed, 2 in flight" in asyncio.run(scenario())
