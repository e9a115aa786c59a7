"""Would the tests notice a fault? `python -m tests.tools.mutate [AREA ...]` makes seeded faults, one at a time.

A fault is a row `[[fault]]` of tests/tools/mutations/AREA.toml: the `file`, the text that `was` in one of its lines,
what it `becomes`, and the `tests` that must notice. It is made in a copy of the tracked files, where these tests run.
"""

import argparse
import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from shutil import copy2
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.paths import ROOT, TESTS

FOLDER = TESTS / "tools" / "mutations"
SHARE = 0.9
"""Least share of the faults that must be found."""
_PYTEST = (sys.executable, "-m", "pytest", "-x", "-n0", "-p", "no:cacheprovider", "-m", "not long and not torch")
_PASSED, _FAILED, _NOT_COLLECTED = range(3)
_INIT = "engine/__init__.py"
_HOME = "import subprocess, sys, sluice.engine; print(sluice.engine.__file__, flush=True)"
_HOMES = f"{_HOME}; subprocess.run([sys.executable, '-c', {_HOME!r}], check=True)"
"""Prints where the product lies that a process imports, and one that it starts."""


class Fault(NamedTuple):
    """One line of the product, made wrong."""

    file: str
    was: str
    becomes: str
    tests: tuple[str, ...]

    def made_in(self, source: str) -> str:
        """Return the file's text with the fault. Raises ValueError if it cannot be made."""
        if (times := source.count(self.was)) != 1:
            raise ValueError(f"{self}: `was` stands {times} times in the file, and must stand there once")
        wrong = source.replace(self.was, self.becomes)
        if ast.dump(ast.parse(wrong)) == ast.dump(ast.parse(source)):
            raise ValueError(f"{self}: this changes nothing")
        return wrong

    def __str__(self) -> str:
        return f"{self.file}: {self.was.strip()} -> {self.becomes.strip()}"


def read_faults(text: str) -> list[Fault]:
    """Return the faults of a file. Raises ValueError for a row that is none."""
    faults = []
    for row in tomllib.loads(text)["fault"]:
        if row.keys() != set(Fault._fields) or not row["tests"] or "\n" in row["was"]:
            raise ValueError(f"a fault has file, was (in one line), becomes and tests; got {row}")
        faults.append(Fault(**row | {"tests": tuple(row["tests"])}))
    return faults


def copy_tree(tree: Path) -> Path:
    """Copy the files that git tracks, and check that the copy is what its processes import."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for file in filter(lambda each: (ROOT / each).exists(), listed.stdout.rstrip("\0").split("\0")):
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        copy2(ROOT / file, tree / file, follow_symlinks=False)
    command = [sys.executable, "-c", _HOMES]
    homes = subprocess.run(command, cwd="/", env=_environment(tree), check=True, capture_output=True, text=True)
    assert homes.stdout.split() == [str(tree / "sluice" / _INIT)] * 2, homes
    return tree


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree)}  # noqa: TID251 - passed on


def notices(tree: Path, tests: Sequence[str], fault: Fault | None) -> bool:
    """Say whether one of the tests fails in a copy that has the fault. One that hangs fails by pytest's own limit."""
    path = tree / (fault or Fault(_INIT, "", "", ())).file
    source = path.read_text()
    path.write_text(fault.made_in(source) if fault else source)
    run = subprocess.run([*_PYTEST, *tests], cwd=tree, env=_environment(tree), capture_output=True, text=True)
    path.write_text(source)
    # It would stand for the next fault of the same second and length.
    Path(cache_from_source(str(path))).unlink(missing_ok=True)
    if run.returncode not in (_PASSED, _FAILED, _NOT_COLLECTED):
        raise RuntimeError(f"{' '.join(tests)}: pytest ended with {run.returncode}\n{run.stdout}{run.stderr}")
    return run.returncode != _PASSED


def try_all(faults: Sequence[Fault], num_jobs: int) -> dict[Fault, bool]:
    """Say of each fault whether it is noticed. Raises ValueError if one cannot be made, or its tests fail without."""
    for fault in faults:
        fault.made_in((ROOT / fault.file).read_text())
    free: SimpleQueue[Path] = SimpleQueue()

    def run(tests: Sequence[str], fault: Fault | None) -> bool:
        tree = free.get()
        try:
            noticed = notices(tree, tests, fault)
        finally:
            free.put(tree)
        word = ("FAILS" if noticed else "passes") if fault is None else "found" if noticed else "SURVIVED"
        sys.stdout.write(f"{word:9} {fault or ' '.join(tests)}\n")
        sys.stdout.flush()
        return noticed

    with TemporaryDirectory(prefix="sluice-faults-") as folder, ThreadPoolExecutor(num_jobs) as pool:
        for number in range(num_jobs):
            free.put(copy_tree(Path(folder).resolve() / str(number)))
        groups = sorted({fault.tests for fault in faults})
        if any(pool.map(lambda tests: run(tests, None), groups)):
            raise ValueError("these tests must pass where there is no fault")
        return dict(zip(faults, pool.map(lambda fault: run(fault.tests, fault), faults), strict=True))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.mutate", description=__doc__)
    parser.add_argument("areas", nargs="*", metavar="AREA", help="files of tests/tools/mutations; default: all")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="copies in which tests run at a time; default: 1")
    options = parser.parse_args(arguments)
    files = [FOLDER / f"{each}.toml" for each in options.areas] or sorted(FOLDER.glob("*.toml"))
    found = try_all([fault for file in files for fault in read_faults(file.read_text())], options.jobs).values()
    share = sum(found) / len(found)
    sys.stdout.write(f"{sum(found)} of {len(found)} faults found: {share:.0%}; at least {SHARE:.0%} must be\n")
    return 0 if share >= SHARE else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
