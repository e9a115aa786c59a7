"""Runs a command that ends with the process that started it, however that ends: `python -m sluice.cli.fleet.leash
PARENT_PID COMMAND ...`. An actor that Ray kills, or that dies with its node's processes, leaves no engine behind."""

import os
import signal
import sys

from sluice.engine.process.process_group import send_at_starters_end


def main(argv: list[str]) -> int:
    """Become the command in `argv`. Returns only where the parent has ended already."""
    parent, *command = argv
    send_at_starters_end(signal.SIGKILL)
    if os.getppid() == int(parent):
        os.execvp(command[0], command)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
