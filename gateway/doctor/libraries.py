"""Versions of what is installed, read from the distributions: nothing of it is imported."""

import re
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, requires, version

from gateway.doctor.facts import Libraries

DISTRIBUTIONS = ("sluice", "openvino", "onnxruntime", "transformers", "tokenizers", "tensorrt-llm", "tensorrt", "torch")
_LOCAL_CUDA = re.compile(r"\+cu(\d{2})(\d+)")
_RUNTIME = re.compile(r"nvidia-cuda-runtime(?:-cu\d+)?\s*\(?==?\s*(\d+)\.(\d+)")


def read_libraries(
    version_of: Callable[[str], str] = version, requires_of: Callable[[str], list[str] | None] = requires
) -> Libraries:
    """Those of DISTRIBUTIONS that are there."""
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = version_of(name)
        except PackageNotFoundError:
            continue
    cuda = _torch_cuda(versions["torch"], requires_of("torch") or []) if "torch" in versions else None
    return Libraries(versions, cuda)


def _torch_cuda(torch_version: str, requirements: Iterable[str]) -> tuple[int, int] | None:
    """A wheel says it in its local version (`+cu128`), or in the CUDA runtime that it requires."""
    if local := _LOCAL_CUDA.search(torch_version):
        return int(local[1]), int(local[2])
    if "+cpu" in torch_version:
        return None
    found = next((match for text in requirements if (match := _RUNTIME.match(text))), None)
    return (int(found[1]), int(found[2])) if found else None
