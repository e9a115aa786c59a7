"""The parts of `make bench-gpu` on small shapes: what they need is there, and what they compute on the GPU is right."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.parts import PARTS
from sluice.cli.gpus import GpuFacts
from tests.paths import ROOT


@pytest.mark.gpu("`make bench-gpu`, small shapes: {part}")
@pytest.mark.parametrize("part", [part.name for part in PARTS])
def test_a_part_runs(gpus: tuple[GpuFacts, ...], tmp_path: Path, part: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} has no CUDA")
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", f"--parts={part}", f"--out={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    if "skipped: " in done.stdout:
        pytest.skip(done.stdout.partition("skipped: ")[2].splitlines()[0])
