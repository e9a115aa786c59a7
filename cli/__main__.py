"""`python -m cli` is `sluice`."""

import sys

from cli.main import main

sys.exit(main())
