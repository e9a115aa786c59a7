"""Wall clocks of the fleet's processes that a fault may move, by libfaketime. Monotonic clocks stay as they are."""

import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

_PACKAGED = "vendor/libfaketime/src/libfaketime.so.1"
_SYSTEM = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib/faketime/libfaketimeMT.so.1")
_HOW = "install libfaketime 0.9.11 or newer: pip install libfaketime"
_PROBE = "import time; time.sleep(0.01); print(time.time())"
_PROBED_S = -1e6
_PATIENCE_S = 20.0


class MovableClock:
    """The wall clock of a program and of all that it starts."""

    def __init__(self, library: Path, file: Path) -> None:
        """`file` tells the processes how their clock stands, and is made here."""
        self._library = library
        self._file = file
        self.move(0.0)

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables with which a process has this clock."""
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",  # without it each look at the clock reads the file
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }

    def move(self, offset_s: float) -> None:
        """Let the clock stand so far before the machine's. Processes look every second or two."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{offset_s:+.0f}")
        fresh.replace(self._file)


def find_faketime() -> tuple[Path | None, str]:
    """Return the library that moves clocks, or None and why there is none."""
    problem = "libfaketime was not found"
    for library in _candidates():
        found = _find_problem(library)
        if found is None:
            return library, ""
        problem = f"{library} cannot be used: {found}"
    return None, f"{problem}; {_HOW}"


def _candidates() -> Iterator[Path]:
    spec = importlib.util.find_spec("libfaketime")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        if (packaged := Path(folder) / _PACKAGED).exists():
            yield packaged
    for pattern in _SYSTEM:
        yield from Path("/").glob(pattern.removeprefix("/"))


def _find_problem(library: Path) -> str | None:
    """Say what is wrong with a library: older ones break `sleep` while the clock is moved. None for nothing."""
    with tempfile.TemporaryDirectory() as folder:
        clock = MovableClock(library, Path(folder) / "clock")
        clock.move(_PROBED_S)
        done = subprocess.run(
            (sys.executable, "-c", _PROBE),
            capture_output=True,
            text=True,
            env=dict(clock.environment),
            timeout=_PATIENCE_S,
            check=False,
        )
    if done.returncode:
        return done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
    off_s = float(done.stdout) - time.time() - _PROBED_S
    return None if abs(off_s) < _PATIENCE_S else f"it moved a clock to {off_s:.0f} s from where it should stand"
