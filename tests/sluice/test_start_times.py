"""The marks of a start: in order, with the time before each."""

import re
import subprocess
import sys

PROGRAM = """
import time
time.sleep(0.2)
from sluice.start_times import START_TIMES
START_TIMES.mark("slept")
START_TIMES.mark("done")
print("\\n".join(START_TIMES.lines()))
"""


def test_times_count_from_the_start_of_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    slept, ended = (re.fullmatch(r" *(\d+) ms \(\+(\d+)\) (\w+)", line) for line in done.stdout.splitlines())
    assert slept is not None
    assert ended is not None
    assert slept[1] == slept[2]
    assert int(slept[1]) >= 200  # the sleep was before the module was imported
    assert int(ended[1]) - int(slept[1]) - int(ended[2]) in (-1, 0, 1)
    assert (slept[3], ended[3]) == ("slept", "done")
