"""Priorities of what computes: it keeps every core busy, and gives way to the gateway, which needs little of the
processor but at once. Without this, streams and `/health` wait for it up to half a second on a machine of two cores."""

import os
import sys
from contextlib import suppress
from pathlib import Path

NICENESS = 5
"""Niceness of computing threads above the gateway's. Such a thread gets a quarter of a core beside the gateway's."""
_MAX_NICENESS = 19


def lower_process() -> None:
    """Lower the priority of this process: of the threads it has, such as those of numpy, and of all that they start."""
    os.nice(NICENESS)
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, int(thread.name), os.getpriority(os.PRIO_PROCESS, os.getpid()))
    with suppress(OSError):  # where Linux ranks the processes of a session among themselves, each session has its own
        Path("/proc/self/autogroup").write_text(str(NICENESS))


def lower_thread() -> None:
    """Lower the priority of the calling thread, and of those that it starts, where threads have one: on Linux."""
    if sys.platform == "linux":
        niceness = os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICENESS
        os.setpriority(os.PRIO_PROCESS, 0, min(niceness, _MAX_NICENESS))
