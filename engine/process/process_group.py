"""Processes that belong together: an engine's with those that it started, and the gateway that it must not outlive."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PARENT_CHECK_S = 1.0
KILL_ROUNDS = 3
"""A process may start another while it is looked for."""
_PROC = Path("/proc")


def kill_session(leader: int) -> None:
    """Kill every process of the session that `leader` began, whether it is still there or not, but for this one.

    A launcher gives its ranks process groups of their own, but they stay in its session.
    """
    if os.getpgid(0) != leader:  # one's own group would take this process along before it has found the others
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
    """Processes of the session; none where there is no /proc."""
    return {int(stat.parent.name) for stat in _PROC.glob("[0-9]*/stat") if _session_of(stat) == leader}


def _session_of(stat: Path) -> int | None:
    try:
        after_name = stat.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # it has just ended
        return None
    state, session = after_name[0], int(after_name[3])
    return None if state == "Z" else session


def end_with(parent: int, clean_up: Callable[[], None]) -> None:
    """Watch `parent` on a thread: when it ends, `clean_up`, and end this process with all of its session.

    `parent` need not have started this process: between them may stand a launcher. The session is only taken along
    where it is not the parent's too.
    """
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
    except OSError:  # a kernel, or a sandbox, without
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
