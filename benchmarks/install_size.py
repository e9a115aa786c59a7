"""The disk space of `pip install .`, for serving alone."""

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.figures import BenchmarkError, Figure, Target

TARGET = Target(900.0)
PROJECT = Path(__file__).parents[1]


def measure(folder: Path) -> list[Figure]:
    """Install into a fresh environment under `folder`, sum the sizes of its files, and remove it."""
    environment = folder / "install"
    shutil.rmtree(environment, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(environment))
    _run(str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", str(PROJECT))
    size_mb = _size_bytes(environment) / 1e6
    shutil.rmtree(environment)
    return [Figure("installed size", "serving environment", "MB", (size_mb,), TARGET)]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"{' '.join(command)} failed: {done.stderr.strip()}")


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
