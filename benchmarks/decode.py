"""Steps of the runner alone on model M: bf16 beside int8, each in a process of its own, in turns."""

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.models import build_m
from benchmarks.step_batches import step_batch
from sluice.engine.config import EngineConfig
from sluice.engine.runners.openvino.runner import load_runner
from sluice.gateway.checkpoint import find_checkpoint

WEIGHTS = ("none", "int8")
NUM_SEQS = (1, 8, 32, 64)
CONTEXT = 250
PROMPT = 512
NUM_STEPS = 10
_LIMIT_S = 300


def measure(repeats: int, out: Path, report: ReportProgress) -> list[Figure]:
    """Measure decode steps of several batch sizes and a prompt, with the weights as they are and as int8."""
    checkpoint = build_m(out.resolve() / "models", find_checkpoint(None))
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    for repeat in range(repeats):
        for weights in WEIGHTS if repeat % 2 == 0 else reversed(WEIGHTS):
            for name, milliseconds in _run(checkpoint, weights).items():
                samples[name, weights].append(milliseconds)
            report(f"{weights}: one sequence {samples[_name(1), weights][-1]:.1f} ms a step")
    figures = []
    for name in dict.fromkeys(name for name, _ in samples):
        plain, small = (samples[name, weights] for weights in WEIGHTS)
        figures += [Figure(name, "M, bf16", "ms", tuple(plain)), Figure(name, "M, int8", "ms", tuple(small))]
        ratios = tuple(one / other for one, other in zip(plain, small, strict=True))
        target = Target(1.6, is_ceiling=False) if name == _name(1) else None
        figures.append(Figure(name, "bf16 / int8", "ratio", ratios, target))
    return figures


def _name(num_seqs: int) -> str:
    return f"decode step, {num_seqs} sequences"


def _run(checkpoint: Path, weights: str) -> dict[str, float]:
    command = (sys.executable, "-m", "benchmarks.decode", str(checkpoint), weights)
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise BenchmarkError(f"the runner with {weights} failed: {done.stderr.strip()[-300:]}")
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def main(checkpoint: str, weights: str) -> None:
    """Print the median times of steps as JSON."""
    runner = load_runner(EngineConfig(model_path=checkpoint, quantization=weights))
    block_size = runner.info.block_size
    times = {}
    for num_seqs in NUM_SEQS:
        batch = step_batch([CONTEXT] * num_seqs, [1] * num_seqs, block_size, runner.info.num_blocks)
        times[_name(num_seqs)] = _median_ms(partial(runner.run, batch))
    prompt = step_batch([0], [PROMPT], block_size, runner.info.num_blocks)
    times[f"prompt of {PROMPT} tokens"] = _median_ms(partial(runner.run, prompt))
    sys.stdout.write(json.dumps(times) + "\n")


def _median_ms(step: Callable[[], object]) -> float:
    for _ in range(2):
        step()
    times = []
    for _ in range(NUM_STEPS):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return float(np.median(times) * 1e3)


if __name__ == "__main__":
    main(*sys.argv[1:])
