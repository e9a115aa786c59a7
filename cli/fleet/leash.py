"""Runs a command that ends with the process that started it, however that ends: `python -m sluice.cli.fleet.leash
PARENT_PID COMMAND ...`. An actor that Ray kills, or that dies with its node's processes, leaves no engine behind."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Become the command in `argv`. Returns only where the parent has ended already."""
    parent, *command = argv
    # The kernel keeps the setting through exec. The signal comes when the parent's thread ends that made this process.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == int(parent):
        os.execvp(command[0], command)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
