"""`python -m load`, the same as `sluice load`."""

import sys

from load.cli import command

sys.exit(command(sys.argv[1:]))
