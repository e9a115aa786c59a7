"""Gathers what the host has."""

import os
import platform
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

from cli.doctor.facts import Machine
from cli.doctor.gpus import read_gpus
from cli.doctor.libraries import read_libraries
from engine.runners.openvino.runner import cpu_capabilities
from sluice.machine import available_bytes


def read_machine(host: str, ports: Iterable[int], cache_folder: Path, engine_python: str | None = None) -> Machine:
    """`host` and `ports` are those to serve at; `engine_python` is the engine's, where that has its own.

    Takes about a second, most of it OpenVINO's start. Raises SluiceError INVALID for an `engine_python` that is none.
    """
    return Machine(
        python_version=platform.python_version(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_available_bytes=available_bytes(),
        cpu_dtypes=cpu_capabilities(),
        cache_folder=cache_folder,
        disk_free_bytes=shutil.disk_usage(_existing(cache_folder)).free,
        gpus=read_gpus(),
        libraries=read_libraries(engine_python=engine_python),
        busy_ports=tuple(port for port in ports if _is_busy(host, port)),
    )


def _existing(folder: Path) -> Path:
    """The nearest folder above that is there: what is to be made will lie on its disk."""
    return next(each for each in (folder, *folder.absolute().parents) if each.exists())


def _is_busy(host: str, port: int) -> bool:
    """Whether it cannot be listened on."""
    if port == 0:
        return False
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False
