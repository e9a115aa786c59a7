"""Versions of what is installed, read from the distributions: nothing of it is imported."""

import re
import subprocess
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import msgspec

from cli.doctor.facts import Libraries
from sluice.errors import ErrorCode, SluiceError

ENGINES = ("tensorrt-llm", "tensorrt", "torch")
"""Of the engine's environment, where that is another."""
DISTRIBUTIONS = ("sluice", "openvino", "onnxruntime", "transformers", "tokenizers", *ENGINES)
ANSWER_S = 20.0
_QUESTION = """
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
_RUNTIME = re.compile(r"nvidia-cuda-runtime(?:-cu\d+)?\s*\(?==?\s*(\d+)\.(\d+)")


def read_libraries(
    version_of: Callable[[str], str] = version,
    requires_of: Callable[[str], list[str] | None] = requires,
    engine_python: str | None = None,
) -> Libraries:
    """Those of DISTRIBUTIONS that are there; those of ENGINES as `engine_python` has them, where one is named.

    Raises SluiceError INVALID for one that cannot be asked.
    """
    versions = _versions(DISTRIBUTIONS, version_of)
    if engine_python is not None:
        elsewhere = _ask(engine_python)
        requires_of = partial(_requirements, elsewhere)
        versions = {name: text for name, text in versions.items() if name not in ENGINES}
        versions |= {name: text for name, (text, _) in elsewhere.items()}
    cuda = _torch_cuda(versions["torch"], requires_of("torch") or []) if "torch" in versions else None
    return Libraries(versions, cuda)


def _versions(names: Iterable[str], version_of: Callable[[str], str]) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = version_of(name)
        except PackageNotFoundError:
            continue
    return versions


def _ask(python: str) -> dict[str, Any]:
    """Version and requirements of each of ENGINES that another Python has."""
    command = (python, "-c", _QUESTION, *ENGINES)
    try:
        said = subprocess.run(command, timeout=ANSWER_S, check=True, capture_output=True).stdout
        return msgspec.json.decode(said, type=dict[str, tuple[str, list[str]]])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        message = f"--engine-python must be a Python that can be run, got {python!r}: {error}"
        raise SluiceError(ErrorCode.INVALID, message) from None


def _requirements(found: dict[str, Any], name: str) -> list[str]:
    requirements: list[str] = found[name][1]
    return requirements


def _torch_cuda(torch_version: str, requirements: Iterable[str]) -> tuple[int, int] | None:
    """A wheel says it in its local version (`+cu128`), or in the CUDA runtime that it requires."""
    if local := _LOCAL_CUDA.search(torch_version):
        return int(local[1]), int(local[2])
    if "+cpu" in torch_version:
        return None
    found = next((match for text in requirements if (match := _RUNTIME.match(text))), None)
    return (int(found[1]), int(found[2])) if found else None
