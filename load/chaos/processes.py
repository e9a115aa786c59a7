"""A process of the fleet: started, killed, stopped, continued and started again at the same address."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sluice.load.chaos.clocks import MovableClock

START_S = 600.0
"""Longest start, on a machine that other work shares."""


class FleetError(Exception):
    """A part of the fleet could not be started. The message is for the user."""


@dataclass(slots=True)
class Program:
    """A program of the fleet, whose output goes to `log`."""

    name: str
    command: Sequence[str]
    log: Path
    ready_lines: int = 0
    """Lines of standard output after which it serves."""
    environment: Mapping[str, str] | None = None
    clock: MovableClock | None = None
    """Its wall clock, where that can be moved."""
    user: str | None = None
    cwd: Path | None = None
    """The folder that it is started in; None for the log's."""
    started_at: float = 0.0
    """The time of its last start, by `time.time`."""
    replacing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by who has killed it and starts it again."""
    _process: "subprocess.Popen[bytes] | None" = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Start it and wait until it serves. Raises FleetError where it ends or takes too long."""
        self._open()
        try:
            async with asyncio.timeout(START_S):
                while self._num_lines() < self.ready_lines:
                    if not self.is_running:
                        raise FleetError(f"{self.name} ended at its start; see {self.log}")
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise FleetError(f"{self.name} did not start within {START_S:.0f} s; see {self.log}") from None

    def _open(self) -> None:
        with self.log.open("ab") as log, self._output.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                cwd=self.cwd or self.log.parent,
                env=self._full_environment(),
                user=self.user,
            )
        self.started_at = time.time()

    def _full_environment(self) -> dict[str, str]:
        clock = {} if self.clock is None else self.clock.environment
        return {**os.environ, **(self.environment or {}), **clock}  # noqa: TID251 - it inherits what this process has

    @property
    def _output(self) -> Path:
        return self.log.with_suffix(".out")

    def _num_lines(self) -> int:
        return self._output.read_bytes().count(b"\n")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. One that has ended gets none."""
        if self.is_running:
            os.kill(self.pid, number)

    async def kill(self) -> None:
        """Kill it and wait for its end. Harmless where it was never started."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)

    async def end(self, patience_s: float = 20.0) -> None:
        """Ask it to end, and kill it where it does not. Harmless where it was never started."""
        if self._process is None:
            return
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        try:
            await asyncio.to_thread(self._process.wait, patience_s)
        except subprocess.TimeoutExpired:
            await self.kill()

    def children(self, *words: str) -> list[psutil.Process]:
        """Return its children, those of them whose command line has one of `words`."""
        return [each for each in _children(self.pid) if any(word in _command_line(each) for word in words)]

    def family(self) -> list[psutil.Process]:
        """Return the process and all that it has started."""
        return [psutil.Process(self.pid), *_children(self.pid, is_recursive=True)] if self.is_running else []


def _children(pid: int, *, is_recursive: bool = False) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=is_recursive)
    except psutil.Error:
        return []


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
