"""Where a measurement was made: figures mean little without it."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and the Python that this process runs on."""

    platform: str
    processor: str
    num_cores: int
    python: str
    sluice_version: str


def this_machine() -> Machine:
    """Read now; nothing of it changes during a run."""
    return Machine(
        platform=platform.platform(),
        processor=_processor_name(),
        num_cores=os.cpu_count() or 1,
        python=platform.python_version(),
        sluice_version=_sluice_version(),
    )


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _sluice_version() -> str:
    try:
        return version("sluice")
    except PackageNotFoundError:
        return "not installed"
