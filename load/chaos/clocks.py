"""Wall clocks of the fleet's processes that a fault may move. Monotonic clocks stay as they are.

`moved_clock.c` does it, which the machine's C compiler makes. libfaketime cannot: it takes locks around condition
variables, and a child that a process forks meanwhile never begins; its 0.9.10 breaks `sleep` as well.
"""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_SOURCE = Path(__file__).with_name("moved_clock.c")
_SIZE = 8
_PATIENCE_S = 60.0
_HOW = "install a C compiler for Linux, such as apt-get install gcc libc6-dev"


class ClockError(Exception):
    """Clocks cannot be moved on this machine. The message is for the user."""


class MovableClock:
    """The wall clock of a program and of all that it starts."""

    def __init__(self, library: Path, file: Path) -> None:
        """`library` is what `build_library` has made. `file` tells the processes how their clock stands."""
        self._library = library
        self._file = file
        file.write_bytes(bytes(_SIZE))

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables with which a process has this clock."""
        return {"LD_PRELOAD": str(self._library), "SLUICE_CHAOS_CLOCK": str(self._file)}

    def move(self, offset_s: float) -> None:
        """Set the clock's offset from the machine's."""
        with self._file.open("r+b", buffering=0) as file:
            file.write(round(offset_s).to_bytes(_SIZE, "little", signed=True))


def build_library(folder: Path) -> Path:
    """Compile what moves clocks into a folder. Raises ClockError, which says what to install."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise ClockError(f"no C compiler in PATH; {_HOW}")
    library = folder / "moved_clock.so"
    command = (compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE), "-ldl", "-lpthread")
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    if done.returncode:
        raise ClockError(f"{_SOURCE.name} cannot be compiled: {done.stderr.strip()[:300]}; {_HOW}")
    return library
