"""The engines of the benchmark, both with the real executor: one in simulated time, whose steps take what a model of
costs says, and one with a checkpoint's model, beside a program that takes the processor from it for a while."""

import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.predicted_wait.trial import Trial
from benchmarks.predicted_wait.workloads import MAX_NUM_SEQS, VOCABULARY, Workload
from sluice.engine.arrays import IntArray
from sluice.engine.config import EngineConfig
from sluice.engine.loop.load import load_runner
from sluice.engine.runners.base import Runner, RunnerInfo, StepBatch
from sluice.engine.sampling.host_logits import HostLogits

BURN = "import sys, time; time.sleep({sleep}); end = time.time() + {burn}\nwhile time.time() < end: pass"
"""A program that computes without a pause, after a sleep."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a step, in seconds."""

    step: float = 0.003
    sequence: float = 0.00006
    prefill_token: float = 0.00003
    context_token: float = 0.0000001
    jitter: float = 0.15
    """Standard deviation of the logarithm of a step's time."""
    stall_rate: float = 0.003
    stall_s: float = 0.03


class VirtualClock:
    """A clock that only moves when something says that time has passed."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds


class VirtualRunner(Runner):
    """A model whose tokens count down to the end of sequence: a prompt's last token is the length of its output."""

    def __init__(self, clock: VirtualClock, seed: int, costs: Costs, *, num_blocks: int, is_noisy: bool) -> None:
        self.info = RunnerInfo(
            runtime="virtual",
            model_type="virtual",
            dtype="f32",
            vocab_size=VOCABULARY,
            eos_token_ids=(0,),
            max_model_len=2048,
            block_size=32,
            num_blocks=num_blocks,
        )
        self._clock, self._costs = clock, costs
        self._rng = random.Random(seed)
        self._is_noisy = is_noisy
        self._phase_ends_at, self._slowdown = 0.0, 1.0

    def run(self, batch: StepBatch) -> HostLogits:
        """Sleep for the step's time, and give all weight to the token below the last one."""
        lengths = np.diff(batch.subsequence_begins)
        self._clock.sleep(self._seconds(int((lengths == 1).sum()), lengths, batch.past_lens))
        logits = np.zeros((len(batch.sampled_rows), VOCABULARY), np.float32)
        following = np.maximum(batch.token_ids[batch.sampled_rows] - 1, 0)
        logits[np.arange(len(following)), following] = 1.0
        return HostLogits(logits)

    def _seconds(self, num_decoding: int, lengths: IntArray, past_lens: IntArray) -> float:
        costs, rng = self._costs, self._rng
        if self._is_noisy and self._clock.time_s >= self._phase_ends_at:
            self._slowdown = rng.choice([1.0, 1.0, 1.25, 1.6])
            self._phase_ends_at = self._clock.time_s + rng.uniform(0.1, 0.6)
        seconds = costs.step + costs.sequence * len(lengths) + costs.context_token * float(past_lens.sum())
        seconds += costs.prefill_token * float(lengths.sum() - num_decoding)
        seconds *= self._slowdown * math.exp(rng.gauss(0.0, costs.jitter))
        return seconds + (costs.stall_s * rng.expovariate(1.0) if rng.random() < costs.stall_rate else 0.0)

    def close(self) -> None:
        """Do nothing."""


class VirtualEngine:
    """The executor in simulated time. The same seed gives the same trial."""

    @contextmanager
    def trial(
        self, workload: Workload, seed: int, *, max_num_seqs: int = MAX_NUM_SEQS, queue_size: int = sys.maxsize
    ) -> Iterator[Trial]:
        """Make an engine for one trial."""
        clock = VirtualClock()
        runner = VirtualRunner(clock, seed, Costs(), num_blocks=workload.num_blocks, is_noisy=workload.is_noisy)
        config = EngineConfig(model_path="", max_num_seqs=max_num_seqs, max_queued_requests=queue_size)
        yield Trial(runner, config, clock)


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
    def trial(
        self, workload: Workload, seed: int, *, max_num_seqs: int = MAX_NUM_SEQS, queue_size: int = sys.maxsize
    ) -> Iterator[Trial]:
        """Load the model for one trial."""
        config = EngineConfig(
            model_path=str(self._checkpoint),
            num_blocks=workload.num_blocks,
            max_num_seqs=max_num_seqs,
            max_queued_requests=queue_size,
        )
        runner = load_runner(config)
        try:
            yield Trial(runner, config, _WallClock())
        finally:
            runner.close()

    @contextmanager
    def noise(self, seconds: float) -> Iterator[None]:
        """Run another computing process during the second third of that time."""
        process = subprocess.Popen([sys.executable, "-c", BURN.format(sleep=seconds / 3, burn=seconds / 3)])
        try:
            yield
        finally:
            process.kill()
            process.wait()
