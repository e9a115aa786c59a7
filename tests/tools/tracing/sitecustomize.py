"""Python imports this file at the start of every process that has its folder on PYTHONPATH.

It notes which functions of the product run. SIGUSR1 forgets them; SIGUSR2 writes the files that they stand in to
`SLUICE_TRACE_FOLDER/PID`, one a line, relative to `SLUICE_TRACE_ROOT`.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = os.environ.get("SLUICE_TRACE_ROOT", "")  # noqa: TID251 - set by tests/tools/request_paths.py for this file alone
FOLDER = os.environ.get("SLUICE_TRACE_FOLDER", "")  # noqa: TID251 - as above

_called: set[CodeType] = set()


def _note(frame: FrameType, event: str, argument: Any) -> None:
    if event == "call":
        _called.add(frame.f_code)


def _forget(*_: Any) -> None:
    _called.clear()


def _write(*_: Any) -> None:
    files = {code.co_filename for code in list(_called) if code.co_filename.startswith(f"{ROOT}/sluice/")}
    target = Path(FOLDER) / str(os.getpid())
    partial = target.with_suffix(".part")
    partial.write_text("".join(f"{os.path.relpath(os.path.realpath(file), ROOT)}\n" for file in sorted(files)))
    partial.rename(target)


if ROOT and FOLDER:
    sys.setprofile(_note)
    threading.setprofile(_note)
    signal.signal(signal.SIGUSR1, _forget)
    signal.signal(signal.SIGUSR2, _write)
