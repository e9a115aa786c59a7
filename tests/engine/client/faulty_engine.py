"""An engine whose runner fails on purpose: `python -m tests.engine.client.faulty_engine` in place of
`sluice.engine.process`.

It echoes (`fake_runner.py`) until it reads one of the tokens below. `model_path` is a folder where a test leaves word
for the engines to come: with a file `refuse` in it they cannot be loaded, with `die` they end as soon as they are.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from sluice.engine.arrays import FloatArray
from sluice.engine.config import EngineConfig
from sluice.engine.process.__main__ import main
from sluice.engine.runners.base import StepBatch
from sluice.errors import ErrorCode, SluiceError
from tests.engine.fake_runner import EchoRunner

MODULE = "tests.engine.client.faulty_engine"
CRASH, HANG = 4001, 4002
READ_S = 0.1
"""How long it takes to read an adapter."""
STEP_S = 0.002
"""Duration of a step, so that a test can act on a running stream."""


def without_poison(logits: FloatArray) -> FloatArray:
    """Return logits of which no sampled token is CRASH or HANG."""
    logits[:, [CRASH, HANG]] = -100.0
    return logits


class FaultyRunner(EchoRunner):
    """Kills its process when it reads CRASH, and never returns when it reads HANG."""

    def __init__(self, folder: Path) -> None:
        super().__init__(vocab_size=4096, num_blocks=2048, max_model_len=16_384)
        self._folder = folder

    def compute(self, batch: StepBatch) -> FloatArray:
        if CRASH in batch.token_ids or (self._folder / "die").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        while HANG in batch.token_ids:
            signal.pause()
        time.sleep(STEP_S)
        return without_poison(super().compute(batch))

    def read_adapter(self, number: int, name: str, folder: Path) -> Callable[[], None]:
        time.sleep(READ_S)
        return lambda: None

    def drop_adapters(self, numbers: Collection[int]) -> Callable[[], None]:
        return lambda: None


def load(config: EngineConfig) -> FaultyRunner:
    folder = Path(config.model_path)
    if (folder / "refuse").exists():
        raise SluiceError(ErrorCode.INTERNAL, "the model is nowhere to be found")
    return FaultyRunner(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], load))
