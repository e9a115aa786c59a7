"""The process that turns a checkpoint into an OpenVINO IR: optimum-intel's command, with torch in it and not in ours.

It ends when its standard input does, which is when the engine that started it is gone.
"""

import os
import sys
from threading import Thread

COMMAND = "optimum-cli"


def main() -> None:
    """Run `optimum-cli` with this process's arguments."""
    from optimum.commands.optimum_cli import main as optimum_cli

    Thread(target=_end_with_parent, daemon=True).start()
    sys.argv[0] = COMMAND
    optimum_cli()


def _end_with_parent() -> None:
    while os.read(0, 1):  # not sys.stdin: its lock, held here, would break the interpreter's own end
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
