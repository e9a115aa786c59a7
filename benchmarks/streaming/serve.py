"""`sluice serve` with `benchmarks.streaming.engine` for an engine: the gateway is the product's, as it is."""

import sys

from cli.__main__ import main
from engine.runtimes import BUNDLED

if __name__ == "__main__":
    object.__setattr__(BUNDLED, "process", "benchmarks.streaming.engine")
    sys.exit(main())
