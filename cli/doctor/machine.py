"""Gathers facts about the host: cores, memory, disk, ports, GPUs by NVML, and installed libraries."""

import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import msgspec

from sluice.cli.doctor.facts import InstalledLibraries, MachineFacts
from sluice.cli.gpus import read_driver
from sluice.engine.config import Runtime
from sluice.engine.runtimes import BUNDLED, RUNTIMES
from sluice.errors import ErrorCode, SluiceError
from sluice.machine import available_bytes, num_cores

ENGINE_DISTRIBUTIONS = tuple(
    dict.fromkeys(name for spec in RUNTIMES.values() if spec.library for name in spec.distributions)
)
"""Distributions that belong to the engine's environment where the engine has a Python of its own."""
DISTRIBUTIONS = (
    "sluice",
    *BUNDLED.distributions,
    "onnxruntime",
    "transformers",
    "tokenizers",
    *ENGINE_DISTRIBUTIONS,
)
ENGINE_PYTHON_TIMEOUT_S = 20.0
_LIST_DISTRIBUTIONS = """
import json, sys
from importlib.metadata import PackageNotFoundError, requires, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = [version(name), requires(name) or []]
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_LOCAL_CUDA = re.compile(r"\+cu(\d{2})(\d+)")
_CUDA_RUNTIME = re.compile(r"nvidia-cuda-runtime(?:-cu\d+)?\s*\(?==?\s*(\d+)\.(\d+)")


def read_machine(host: str, ports: Iterable[int], cache_folder: Path, engine_python: str | None = None) -> MachineFacts:
    """Gather the facts of this machine. The server is to listen at `host` and `ports`.

    `engine_python` is the engine's interpreter where it is not this one. Takes about a second, most of it the start of
    OpenVINO. Raises SluiceError INVALID where `engine_python` cannot be run.
    """
    cpu_dtypes, bundled_problem = _import_bundled()
    return MachineFacts(
        python_version=platform.python_version(),
        num_cores=num_cores(),
        memory_available_bytes=available_bytes(),
        cpu_dtypes=cpu_dtypes,
        cache_folder=cache_folder,
        disk_free_bytes=shutil.disk_usage(_nearest_existing(cache_folder)).free,
        driver=read_driver(),
        libraries=read_libraries(engine_python=engine_python),
        environments=dict(_read_own_environments()),
        busy_ports=tuple(port for port in ports if _is_busy(host, port)),
        bundled_problem=bundled_problem,
    )


def _import_bundled() -> tuple[tuple[str, ...], str]:
    """Return the types in which OpenVINO computes on this CPU, and why it cannot be imported, "" where it can."""
    try:
        from sluice.engine.runners.openvino.runner import cpu_capabilities
    except ImportError as error:
        return (), str(error)
    return cpu_capabilities(), ""


def _nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists: it will be created on the same disk."""
    return next(each for each in (folder, *folder.absolute().parents) if each.exists())


def _is_busy(host: str, port: int) -> bool:
    """Whether a server cannot listen on the port."""
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


def read_libraries(
    version_of: Callable[[str], str] = version,
    requires_of: Callable[[str], list[str] | None] = requires,
    engine_python: str | None = None,
) -> InstalledLibraries:
    """Read the installed versions of DISTRIBUTIONS from their metadata, importing none of them.

    ENGINE_DISTRIBUTIONS are read in the environment of `engine_python`, where that is given. Raises SluiceError INVALID
    where it cannot be run.
    """
    versions = _versions(DISTRIBUTIONS, version_of)
    if engine_python is not None:
        of_engine = _read_environment(engine_python)
        requires_of = partial(_requirements, of_engine)
        versions = {name: text for name, text in versions.items() if name not in ENGINE_DISTRIBUTIONS}
        versions |= {name: text for name, (text, _) in of_engine.items()}
    cuda = _torch_cuda(versions["torch"], requires_of("torch") or []) if "torch" in versions else None
    return InstalledLibraries(versions, cuda)


def _versions(names: Iterable[str], version_of: Callable[[str], str]) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = version_of(name)
        except PackageNotFoundError:
            continue
    return versions


def _read_environment(python: str) -> dict[str, Any]:
    """Return (version, requirements) of each of ENGINE_DISTRIBUTIONS that is installed for another Python."""
    command = (python, "-c", _LIST_DISTRIBUTIONS, *ENGINE_DISTRIBUTIONS)
    try:
        output = subprocess.run(command, timeout=ENGINE_PYTHON_TIMEOUT_S, check=True, capture_output=True).stdout
        return msgspec.json.decode(output, type=dict[str, tuple[str, list[str]]])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        message = f"--engine-python must be a Python that can be run, got {python!r}: {error}"
        raise SluiceError(ErrorCode.INVALID, message) from None


def _read_own_environments() -> Iterator[tuple[Runtime, tuple[str, str]]]:
    for spec in RUNTIMES.values():
        python = spec.own_python() if spec.library else None
        if python is not None:
            found = _read_environment(python)
            yield spec.runtime, (python, next((found[name][0] for name in spec.distributions if name in found), ""))


def _requirements(distributions: dict[str, Any], name: str) -> list[str]:
    requirements: list[str] = distributions[name][1]
    return requirements


def _torch_cuda(torch_version: str, requirements: Iterable[str]) -> tuple[int, int] | None:
    """Return the CUDA that torch was built for: from its local version (`+cu128`), or the CUDA runtime it requires."""
    if local := _LOCAL_CUDA.search(torch_version):
        return int(local[1]), int(local[2])
    if "+cpu" in torch_version:
        return None
    found = next((match for text in requirements if (match := _CUDA_RUNTIME.match(text))), None)
    return (int(found[1]), int(found[2])) if found else None
