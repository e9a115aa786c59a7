"""Shared parts of the tests of `sluice build`: the result of a run, and folders to compare."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CommandResult:
    """The output of a command."""

    out: str
    err: str


Build = Callable[..., CommandResult]
"""Runs `sluice build` with the given arguments: `build(folder, "--link", code=2, error="no")`. Its exit code is to be
`code`, which is 0 where none is given, and what it writes to stderr to have `error` in it."""


def tree(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files, by their path."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def names(folder: Path) -> set[str]:
    """Return the names of a folder's entries, hidden ones included."""
    return {path.name for path in folder.iterdir()}
