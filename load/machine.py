"""The machine of a run."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def read_machine_info() -> dict[str, str | int]:
    """Describe the machine: figures mean little without it."""
    return {
        "platform": platform.platform(),
        "processor": _processor_name(),
        "num_cores": os.cpu_count() or 1,
        "python": platform.python_version(),
        "sluice_version": _sluice_version(),
    }


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
