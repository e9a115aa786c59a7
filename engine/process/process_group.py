"""Processes that end together: an engine, the processes that it started, and the gateway that it must not outlive."""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PARENT_CHECK_S = 1.0
KILL_ROUNDS = 3
"""Rounds of killing, because a process may start another one meanwhile."""
_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1


def kill_session(leader: int) -> None:
    """Kill all processes of the session that `leader` started, except this one. `leader` may have ended already. A
    launcher gives its ranks process groups of their own, but they stay in its session."""
    if os.getpgid(0) != leader:  # killing its own group would end this process first
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    for _ in range(KILL_ROUNDS):
        others = session_members(leader) - {os.getpid()}
        if not others:
            return
        for pid in others:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def session_members(leader: int) -> set[int]:
    """Return the processes of the session; none on a system without /proc."""
    return {int(stat.parent.name) for stat in _PROC.glob("[0-9]*/stat") if _session_of(stat) == leader}


def _session_of(stat: Path) -> int | None:
    try:
        after_name = stat.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # the process has just ended
        return None
    state, session = after_name[0], int(after_name[3])
    return None if state == "Z" else session


def send_at_starters_end(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends, also as another program (exec).
    Nothing happens on a system other than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def end_with(parent: int, clean_up: Callable[[], None]) -> None:
    """Watch `parent`, which may have started a launcher between, on a thread. When it ends, call `clean_up` and end
    this process with all of its session, unless that is the parent's too. A process that is stopped goes on for it."""
    send_at_starters_end(signal.SIGCONT)
    has_own_session = _session(0) != _session(parent)

    def watch() -> None:
        _await_end(parent)
        clean_up()
        if has_own_session:
            kill_session(os.getsid(0))
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _await_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # a kernel or a sandbox without pidfd_open
        while _exists(pid):
            time.sleep(PARENT_CHECK_S)
        return
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    poller.poll()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
