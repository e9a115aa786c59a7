"""`sluice serve` with `benchmarks.streaming.engine` for an engine: the gateway is the product's, as it is."""

import sys

from sluice.cli.__main__ import main
from sluice.engine.runtimes import BUNDLED

if __name__ == "__main__":
    object.__setattr__(BUNDLED, "process", "benchmarks.streaming.engine")
    sys.exit(main())
