"""One whole run, of one process or of several."""

import asyncio

from sluice.load.clock import Clock
from sluice.load.config import LoadConfig
from sluice.load.fetch import RunError, get_json
from sluice.load.machine import read_machine_info
from sluice.load.processes import run_in_processes
from sluice.load.single_run import ProgressView, Run, loop_factory, run_single


def run_blocking(config: LoadConfig, view: ProgressView | None = None) -> Run:
    """Run `config` in an event loop of its own."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(run_load(config, view))


async def run_load(config: LoadConfig, view: ProgressView | None = None, clock: Clock | None = None) -> Run:
    """Run `config`. Cancelled while sending (Ctrl-C), it returns the measurements until then.

    Raises `RunError` where the server cannot be reached or a warm-up request fails, `LoadConfigError` for bad
    settings. Several processes go by the machine's clock, whatever `clock` is.
    """
    if config.num_processes > 1:
        return await run_in_processes(config, view)
    return await run_single(config, view, clock)


__all__ = ["ProgressView", "Run", "RunError", "get_json", "read_machine_info", "run_blocking", "run_load"]
