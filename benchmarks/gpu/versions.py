"""Versions: a library that is missing is a figure too."""

import platform
from importlib.metadata import PackageNotFoundError, version

from benchmarks.gpu.parts import Notes, Setting

PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "tokenizers", "msgspec", "pyzmq", "fastapi")
NARROW = ("protobuf", "grpcio", "onnxruntime", "nvidia-ml-py", "openvino")
"""Packages of which certain versions are needed, and what may be missing."""


def measure(setting: Setting, notes: Notes) -> None:
    notes.note("python", version=platform.python_version(), system=platform.platform())
    notes.note("packages", **{name: _version(name) for name in PACKAGES + NARROW})
    import torch

    from sluice.cli.gpus import read_driver

    driver = read_driver()
    notes.note("driver", version=driver.version or driver.reason, cuda=torch.version.cuda or "none")
    if setting.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        notes.note(
            "gpu",
            name=properties.name,
            capability=f"{properties.major}.{properties.minor}",
            processors=properties.multi_processor_count,
            memory_GiB=properties.total_memory / 2**30,
            free_GiB=torch.cuda.mem_get_info()[0] / 2**30,
        )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"
