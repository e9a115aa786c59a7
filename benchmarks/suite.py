"""This part measures the tests: lines, cases, seconds, branches of the product that they run, faults that they find."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from tests.paths import ROOT
from tests.tools.bounds import measure as measure_bounds

COVERAGE = """
[run]
branch = true
parallel = true
patch = subprocess
sigterm = true
source_pkgs = sluice
data_file = {folder}/data
"""
"""Settings of coverage.py: workers, servers and engines are counted with the process that starts them."""
_SUITE = ("pytest", "-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not long and not torch")
_PASSED = re.compile(r"(\d+) passed")
_FOUND = re.compile(r"(\d+) of (\d+) faults found")


def measure(folder: Path, only: str, report: ReportProgress) -> list[Figure]:
    """Measure the parts whose name has `only` in it. The machine must have nothing else to do."""
    parts: dict[str, Callable[[], Iterator[Figure]]] = {
        "lines": _measure_lines,
        "quick": lambda: _measure_target("quick", Target(45.0)),
        "test": lambda: _measure_target("test", Target(240.0)),
        "coverage": lambda: _measure_coverage(folder.resolve()),
        "faults": _measure_faults,
    }
    figures: list[Figure] = []
    for name, part in parts.items():
        if only in name:
            report(name)
            figures += part()
    return figures


def _measure_lines() -> Iterator[Figure]:
    yield Figure("tests", "lines", "", (measure_bounds()["lines.tests"],), Target(75_000))


def _measure_target(target: str, most: Target) -> Iterator[Figure]:
    began = perf_counter()
    output = _run("make", target, "ARGS=--no-header")
    yield Figure("tests", f"make {target}", "s", (perf_counter() - began,), most)
    yield Figure("tests", f"cases of make {target}", "", (int(_find(_PASSED, output)[1]),))


def _measure_coverage(folder: Path) -> Iterator[Figure]:
    folder.mkdir(parents=True, exist_ok=True)
    settings, told = folder / "coverage.ini", folder / "coverage.json"
    settings.write_text(COVERAGE.format(folder=folder))
    command = (sys.executable, "-m", "coverage")
    rcfile = f"--rcfile={settings}"
    for more in (("erase",), ("run", "-m", *_SUITE), ("combine", "-q"), ("json", "-q", "-o", str(told))):
        _run(*command, more[0], rcfile, *more[1:])
    totals = json.loads(told.read_text())["totals"]
    yield Figure("coverage", "branches", "%", (100 * totals["covered_branches"] / totals["num_branches"],))
    yield Figure("coverage", "lines", "%", (100 * totals["covered_lines"] / totals["num_statements"],))


def _measure_faults() -> Iterator[Figure]:
    output = _run(sys.executable, "-m", "tests.tools.mutate", "--jobs=2", may_fail=True)
    found, of = map(int, _find(_FOUND, output).groups())
    yield Figure("seeded faults", f"found, of {of}", "%", (100 * found / of,), Target(90.0, is_ceiling=False))


def _find(pattern: re.Pattern[str], output: str) -> re.Match[str]:
    if (found := pattern.search(output)) is None:
        raise BenchmarkError(f"the output does not say how it ended: {output[-2000:]}")
    return found


def _run(*command: str, may_fail: bool = False) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        raise BenchmarkError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr}")
    return done.stdout
