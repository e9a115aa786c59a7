"""Whether the disks have room for a build, before it begins."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from cli.build.failures import AskedError
from cli.build.steps import Step

_SPARE = 1.05
"""What is written is estimated."""
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_UNIT = 1024


def check_space(folder: Path, steps: Iterable[Step]) -> None:
    """Raises AskedError where `folder`'s disk has less free than the steps need together."""
    num_bytes, free = sum(step.size_bytes() for step in steps), shutil.disk_usage(folder).free
    if num_bytes * _SPARE > free:
        raise AskedError(
            f"not enough space: the build needs about {size_text(num_bytes)} at {folder.parent}, and {size_text(free)} "
            "are free; choose another --output, or --link to copy no weights"
        )


def size_text(num_bytes: float) -> str:
    """As a person says it."""
    for unit in _UNITS[:-1]:
        if num_bytes < _UNIT:
            return f"{num_bytes:.0f} {unit}" if unit in _UNITS[:2] else f"{num_bytes:.1f} {unit}"
        num_bytes /= _UNIT
    return f"{num_bytes:.1f} {_UNITS[-1]}"
