"""torch as an engine process, with the arguments of `sluice.engine.process`."""

import os
import sys

import msgspec

from sluice.engine.config import EngineConfig, Runtime
from sluice.engine.runners.base import Runner

# Threads that spin while they wait, as torch's do by default, keep each other from the cores wherever the gateway has
# work too: a product of 1 ms then takes 20. It is read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # noqa: TID251 - libgomp's own


def load(config: EngineConfig) -> Runner:
    """Load the model on torch, which the configuration may not name: `auto` has chosen it."""
    from sluice.engine.loop.load import load_runner

    return load_runner(msgspec.structs.replace(config, runtime=Runtime.TORCH))


if __name__ == "__main__":
    from sluice.engine.process.__main__ import main

    sys.exit(main(sys.argv[1:], load))
