"""The `sluice` command: finds the subcommand and runs it. `python -m sluice.cli` does the same.

A subcommand is an entry point in the group "sluice.commands": a function that takes the arguments after its name and
returns the exit code. The first line of its docstring is its description in the overview. A part of Sluice adds its
command there without a change to this module, and only the command that runs is imported.
"""

import os
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoints, entry_points, version

from sluice.gateway.options.option import USAGE_ERROR

Command = Callable[[list[str]], int]

GROUP = "sluice.commands"

INTERRUPTED = 130
BROKEN_PIPE = 141
"""128 and the number of SIGPIPE, as shells report it."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    match arguments:
        case [] | ["-h" | "--help" | "help", *_]:
            sys.stdout.write(_overview())
            return 0 if arguments else USAGE_ERROR
        case ["-V" | "--version" | "version", *_]:
            sys.stdout.write(f"sluice {version('sluice')}\n")
            return 0
        case [name, *rest]:
            return _run(name, rest)
    raise AssertionError("every list of arguments has matched")


def _run(name: str, arguments: list[str]) -> int:
    commands = _commands()
    if name not in commands.names:
        known = ", ".join(sorted(commands.names))
        sys.stderr.write(f"sluice: error: unknown command {name!r}; commands: {known}\n")
        return USAGE_ERROR
    command: Command = commands[name].load()
    try:
        code = command(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe, as `head` does. The interpreter flushes stdout at exit: into the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code


def _commands() -> EntryPoints:
    return entry_points(group=GROUP)


def _overview() -> str:
    lines = [f"  {entry.name:<13} {_summary(entry.load())}" for entry in sorted(_commands(), key=lambda e: e.name)]
    commands = "\n".join(lines)
    return f"""usage: sluice COMMAND [OPTIONS]

LLM streaming gateway: in-flight batching behind the OpenAI and Triton v2 APIs.

commands:
{commands}

`sluice COMMAND --help` explains a command, `sluice --version` prints the version.
"""


def _summary(command: Command) -> str:
    return (command.__doc__ or "").strip().partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
