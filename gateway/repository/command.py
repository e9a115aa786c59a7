"""`sluice repository`: look after a model repository without serving it."""

import sys


def command(argv: list[str]) -> int:
    """Check a model repository, or prune old versions, without serving."""
    sys.stderr.write("usage: sluice repository check|prune PATH\n")
    return 2
