"""The three tools of a session, and what is common to the programs that use them."""

import sys
from pathlib import Path

BASE, NAME = sys.argv[1:3]
QUESTION = f"Do as the notes say. [play {NAME}]"


def read_notes(file: str) -> str:
    """Read a file.

    Args:
        file: its path
    """
    return Path(file).read_text()


def write_answer(file: str, content: str) -> str:
    """Write a file.

    Args:
        file: its path
        content: what it has
    """
    Path(file).write_text(content)
    return "written"


def count_bytes(file: str) -> str:
    """Count the bytes of a file.

    Args:
        file: its path
    """
    return str(Path(file).stat().st_size)


TOOLS = (read_notes, write_answer, count_bytes)
