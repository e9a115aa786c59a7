"""Folders compared."""

from pathlib import Path


def tree(folder: Path) -> dict[str, bytes]:
    """The contents of all files, by their path."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def names(folder: Path) -> set[str]:
    """What lies in it, hidden entries too."""
    return {path.name for path in folder.iterdir()}
