"""What a build shows while it runs: a line for each step, and a bar where bytes are counted."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from cli.build.steps import Advance, Convert, Copy, Step, Tool


class Watch:
    """Tells of steps on a console. Lines stay; bars go when their step is done, and are for terminals alone."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_steps = 0
        self._num_begun = 0

    def expect(self, num_steps: int) -> None:
        """How many there will be."""
        self._num_steps = num_steps

    def run(self, step: Step) -> None:
        """Raises what the step raises."""
        self._num_begun += 1
        self._console.print(f"[{self._num_begun}/{self._num_steps}] {step.purpose}", markup=False, highlight=False)
        with self._advance(step) as advance:
            step.run(advance)

    @contextmanager
    def _advance(self, step: Step) -> Iterator[Advance]:
        """A tool of others shows what it likes; where nobody counts bytes, there is the time alone."""
        if isinstance(step, Tool) or not self._console.is_terminal:
            yield lambda num_bytes: None
            return
        counts = isinstance(step, Copy | Convert)
        columns = _counting() if counts else (SpinnerColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("", total=(step.size_bytes() or None) if counts else None)
            yield lambda num_bytes: progress.advance(task, num_bytes)


def _counting() -> tuple[ProgressColumn, ...]:
    return (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeElapsedColumn())
