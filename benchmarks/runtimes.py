"""Steps of torch on the CPU beside OpenVINO's, in float32 and in one process, in turns: wall time and CPU time."""

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.models import build_m
from benchmarks.step_batches import step_batch
from sluice.engine.config import EngineConfig
from sluice.engine.runners.base import Runner, StepBatch
from sluice.gateway.checkpoint import find_checkpoint

STEPS = {
    "decode step, 1 sequence": ([250], [1]),
    "decode step, 8 sequences": ([250] * 8, [1] * 8),
    "decode step, 32 sequences": ([250] * 32, [1] * 32),
    "prompt of 512 tokens": ([0], [512]),
    "7 decodes and a chunk of 64": ([250] * 7 + [64], [1] * 7 + [64]),
}
"""Past and new tokens of the sequences."""
NUM_BLOCKS = 320
BUDGET_S = 6.0
"""Time for the turns of a kind of step, of which there are at least LEAST_TURNS."""
LEAST_TURNS = 3
_LIMIT_S = 900


def measure(repeats: int, out: Path, only: str, report: ReportProgress) -> list[Figure]:
    """Measure the bundled model, and model M."""
    bundled = find_checkpoint(None)
    figures = []
    for name in ("bundled", "M"):
        if only not in name:
            continue
        checkpoint = bundled if name == "bundled" else build_m(out.resolve() / "models", bundled)
        samples: dict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(repeats):
            for step, times in _run(checkpoint).items():
                for what, value in times.items():
                    samples[step, what].append(value)
                report(f"{name}, {step}: {times['torch / OpenVINO, CPU time']:.2f} of OpenVINO's CPU time")
        for (step, what), values in samples.items():
            is_ratio = "/" in what
            target = Target(1.5, is_ceiling=True) if is_ratio else None
            figures.append(Figure(step, f"{name}, {what}", "ratio" if is_ratio else "ms", tuple(values), target))
    return figures


def _run(checkpoint: Path) -> dict[str, dict[str, float]]:
    command = (sys.executable, "-m", "benchmarks.runtimes", str(checkpoint))
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise BenchmarkError(f"the runners of {checkpoint} failed: {done.stderr.strip()[-300:]}")
    times: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return times


def main(checkpoint: str) -> None:
    """Print the median milliseconds of steps, and the ratios of the two runtimes, as JSON."""
    from sluice.engine.runners.openvino.runner import load_runner as load_openvino
    from sluice.engine.runners.torch import process  # noqa: F401 - says how torch's threads wait, before torch is imported
    from sluice.engine.runners.torch.runner import load_runner as load_torch

    config = EngineConfig(model_path=checkpoint, dtype="f32", device="cpu", num_blocks=NUM_BLOCKS, max_num_seqs=64)
    runners: tuple[Runner, Runner] = load_torch(config), load_openvino(config)
    sys.stdout.write(json.dumps({name: _times(runners, *step) for name, step in STEPS.items()}) + "\n")


def _times(runners: Sequence[Runner], past: list[int], new: list[int]) -> dict[str, float]:
    batch = step_batch(past, new, runners[0].info.block_size, NUM_BLOCKS)
    for runner in runners:  # memory is taken, and kernels are made
        runner.run(batch)
    seconds: tuple[list[tuple[float, float]], ...] = ([], [])
    began = time.perf_counter()
    while len(seconds[0]) < LEAST_TURNS or time.perf_counter() - began < BUDGET_S:
        order = (0, 1) if len(seconds[0]) % 2 == 0 else (1, 0)
        for number in order:
            seconds[number].append(_timed(runners[number], batch))
    (ours_wall, ours_cpu), (theirs_wall, theirs_cpu) = (np.median(each, 0) * 1e3 for each in seconds)
    return {
        "torch": float(ours_wall),
        "OpenVINO": float(theirs_wall),
        "torch, CPU time": float(ours_cpu),
        "OpenVINO, CPU time": float(theirs_cpu),
        "torch / OpenVINO": float(ours_wall / theirs_wall),
        "torch / OpenVINO, CPU time": float(ours_cpu / theirs_cpu),
    }


def _timed(runner: Runner, batch: StepBatch) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    runner.run(batch)
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main(*sys.argv[1:])
