"""Finds programs that tests run where they are installed."""

import shutil
import sys
from pathlib import Path


def program(*names: str) -> list[str] | None:
    """Return the first of `names` on the path or beside this Python, None where there is none."""
    for name in names:
        found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
        if found is not None:
            return [found]
    return None
