"""An engine with a model, in real time, and another program that takes the processor from it for a while."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.predicted_wait.trial import Trial
from benchmarks.predicted_wait.workloads import MAX_NUM_SEQS, Workload
from engine.config import EngineConfig
from engine.loop.load import load_runner

BURN = "import sys, time; time.sleep({sleep}); end = time.time() + {burn}\nwhile time.time() < end: pass"


class _WallClock:
    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class RealEngine:
    """The executor with the checkpoint's model on this machine."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint

    @contextmanager
    def trial(self, workload: Workload, seed: int) -> Iterator[Trial]:
        """Load the model for one trial."""
        config = EngineConfig(
            model_path=str(self._checkpoint),
            num_blocks=workload.num_blocks,
            max_num_seqs=MAX_NUM_SEQS,
            max_queued_requests=sys.maxsize,
        )
        runner = load_runner(config)
        try:
            yield Trial(runner, config, _WallClock())
        finally:
            runner.close()

    @contextmanager
    def noise(self, seconds: float) -> Iterator[None]:
        """Let another process compute during the second third of that time."""
        process = subprocess.Popen([sys.executable, "-c", BURN.format(sleep=seconds / 3, burn=seconds / 3)])
        try:
            yield
        finally:
            process.kill()
            process.wait()
