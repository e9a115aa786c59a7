"""What a worker process is started with."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.backends.python.worker.start import OURS

_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that can run a worker.

    `lent`: packages that the server's installation lends it, each with the folder that it lies in. `variables`: of its
    environment, where it is one; `bin_folder` then comes first on the PATH, and variables meant for the server's own
    interpreter are ignored.
    """

    executable: str
    lent: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    bin_folder: str = ""


OWN = Interpreter(sys.executable)
"""The one that the server runs in."""


@dataclass(frozen=True, slots=True)
class Launch:
    """`cores` that it keeps to, empty for any. `start_timeout_s` is to be there, before the model is loaded."""

    interpreter: Interpreter = OWN
    cores: frozenset[int] = frozenset()
    start_timeout_s: float = 30.0

    def arguments(self, script: Path, socket_fd: int, progress_fd: int) -> list[str]:
        """Of the process; `script` is `worker/start.py`."""
        python = self.interpreter
        launch: dict[str, Any] = {
            "socket": socket_fd,
            "progress": progress_fd,
            "cores": sorted(self.cores),
            "lent": {OURS: str(_ROOT), **python.lent},
            "variables": python.variables,
            "bin": python.bin_folder,
        }
        isolation = ("-E", "-s") if python.bin_folder else ()
        return [python.executable, *isolation, str(script), json.dumps(launch)]
