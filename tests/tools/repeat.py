"""Is the suite ever red by luck? `python -m tests.tools.repeat NUM [ARGUMENTS OF pytest]` runs it again and again.

Each run is `make test`, beside processes that keep every core busy. Nothing counts twice: a test that fails once is in
the list at the end. The output of each run is kept in build/repeat.
"""

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.paths import ROOT

FOLDER = ROOT / "build" / "repeat"
NUM_BUSY = 4
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+)", re.MULTILINE)
_BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""Ends with the process that started it, however that ends."""


@contextmanager
def busy(num: int) -> Iterator[None]:
    """Keep so many processes busy meanwhile."""
    with ExitStack() as stack:
        for _ in range(num):
            stack.callback(subprocess.Popen([sys.executable, "-c", _BUSY]).kill)
        yield


def run_once(number: int, arguments: str) -> list[str]:
    """Run the suite, and return the tests that failed; the run itself, where it ended in another way."""
    output = FOLDER / f"{number}.log"
    with output.open("w") as log:
        ended = subprocess.run(["make", "test", f"ARGS={arguments}"], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    failed = _FAILED.findall(output.read_text())
    return failed or ([f"{output}: make ended with {ended.returncode}"] if ended.returncode else [])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.repeat", description=__doc__)
    parser.add_argument("num", type=int, help="runs")
    parser.add_argument("--busy", type=int, default=NUM_BUSY, help="processes beside them (%(default)s)")
    options, for_pytest = parser.parse_known_args(arguments)
    FOLDER.mkdir(parents=True, exist_ok=True)
    failures: Counter[str] = Counter()
    with busy(options.busy):
        for number in range(1, options.num + 1):
            began = time.monotonic()
            failed = run_once(number, " ".join(for_pytest))
            failures.update(failed)
            sys.stdout.write(f"run {number} of {options.num}: {time.monotonic() - began:.0f} s, {len(failed)} failed\n")
            sys.stdout.flush()
    for test, num in failures.most_common():
        sys.stdout.write(f"{num:4} of {options.num}  {test}\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
