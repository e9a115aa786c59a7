"""Fakes of TensorRT, CUDA's runtime and the driver, as far as plans need them, on a machine without a GPU.

A "plan" is JSON: tensors, profiles, and the factor from input to output. The memory of the GPU is numpy's.
"""

import ctypes
import json
import sys
from dataclasses import dataclass, field
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pynvml
import pytest

from sluice.serving.tensors.tensor import Array

NUMPY = {"FLOAT": "float32", "HALF": "float16", "INT32": "int32", "INT64": "int64", "BOOL": "bool"}


def plan(**changes: Any) -> dict[str, Any]:
    """Make a plan whose `y` is twice `x`, each of 4 columns and up to 8 rows."""
    default = {
        "inputs": {"x": ["FLOAT", [-1, 4]]},
        "outputs": {"y": ["FLOAT", [-1, 4]]},
        "profiles": [{"x": [[1, 4], [4, 4], [8, 4]]}],
        "factor": 2,
    }
    return default | changes


@dataclass
class Machine:
    """Records what a test looks at: memory and streams in use, runs by profile, engines by GPU."""

    capabilities: list[tuple[int, int]]
    memory: dict[int, Array] = field(default_factory=dict)
    streams: set[int] = field(default_factory=set)
    runs: list[int] = field(default_factory=list)
    engines: list[int] = field(default_factory=list)
    current: int = 0
    fails_to_execute: bool = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Install the fakes in place of the modules, whether these exist or not."""
        for name, module in (
            ("tensorrt", _tensorrt(self)),
            ("cuda", ModuleType("cuda")),
            ("cuda.bindings", ModuleType("cuda.bindings")),
            ("cuda.bindings.runtime", _cuda(self)),
        ):
            module.__spec__ = ModuleSpec(name, None)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(
            sys.modules["cuda.bindings"], "runtime", sys.modules["cuda.bindings.runtime"], raising=False
        )
        install_driver(monkeypatch, self.capabilities)


def install_driver(monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]]) -> None:
    """Fake GPUs of these compute capabilities; with none, there is no driver either."""

    def init() -> None:
        if not capabilities:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(capabilities))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", lambda index: capabilities[index])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda index: f"Test {index}")


class _Status(Enum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2


class _CopyKind(Enum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


def _cuda(machine: Machine) -> Any:
    module: Any = ModuleType("cuda.bindings.runtime")
    module.cudaError_t, module.cudaMemcpyKind = _Status, _CopyKind
    success = module.cudaError_t.cudaSuccess

    def malloc(size_bytes: int) -> tuple[Any, int]:
        if size_bytes > 1 << 20:
            return module.cudaError_t.cudaErrorMemoryAllocation, 0
        memory = np.zeros(size_bytes, np.uint8)
        machine.memory[memory.ctypes.data] = memory
        return success, memory.ctypes.data

    def free(address: int) -> tuple[Any]:
        del machine.memory[address]
        return (success,)

    def copy(to: int, source: int, size_bytes: int, kind: Any, stream: int) -> tuple[Any]:
        on_gpu = to if kind is module.cudaMemcpyKind.cudaMemcpyHostToDevice else source
        assert machine.memory[on_gpu].nbytes >= size_bytes
        assert stream in machine.streams
        ctypes.memmove(to, source, size_bytes)
        return (success,)

    def new_stream() -> tuple[Any, int]:
        stream = max(machine.streams, default=0) + 1
        machine.streams.add(stream)
        return success, stream

    def end_stream(stream: int) -> tuple[Any]:
        machine.streams.remove(stream)
        return (success,)

    def set_device(index: int) -> tuple[Any]:
        machine.current = index
        return (success,)

    module.cudaSetDevice, module.cudaMalloc, module.cudaFree, module.cudaMemcpyAsync = set_device, malloc, free, copy
    module.cudaStreamCreate, module.cudaStreamDestroy = new_stream, end_stream
    module.cudaStreamSynchronize = lambda stream: (success,)
    module.cudaGetErrorString = lambda status: (success, b"out of memory")
    return module


class _Logger:
    Severity = Enum("Severity", ["INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"])


class _Context:
    def __init__(self, machine: Machine, content: dict[str, Any]) -> None:
        self._machine = machine
        self._plan = content
        self._profile = -1
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        if self._plan.get("has_broken_profiles"):
            raise RuntimeError("Error in set optimization profile async.")
        self._profile = index
        return stream in self._machine.streams

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        smallest, _, largest = self._plan["profiles"][self._profile][name]
        self._shapes[name] = shape
        return all(low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True))

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if self._plan.get("is_data_dependent"):
            return (-1, 4)
        return self._shapes["x"]

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return address in self._machine.memory

    def execute_async_v3(self, stream: int) -> bool:
        if self._machine.fails_to_execute:
            return False
        dtype = NUMPY[self._plan["inputs"]["x"][0]]
        size_bytes = int(np.prod(self._shapes["x"])) * np.dtype(dtype).itemsize
        memory = self._machine.memory
        given = memory[self._addresses["x"]][:size_bytes].view(dtype)
        memory[self._addresses["y"]][:size_bytes].view(dtype)[:] = given * self._plan["factor"]
        self._machine.runs.append(self._profile)
        return stream in self._machine.streams


class _Engine:
    def __init__(self, machine: Machine, content: dict[str, Any]) -> None:
        self._machine = machine
        self._plan = content
        self._tensors = content["inputs"] | content["outputs"]
        self.num_io_tensors = len(self._tensors)
        self.num_optimization_profiles = len(content["profiles"])

    def get_tensor_name(self, index: int) -> str:
        names: list[str] = list(self._tensors)
        return names[index]

    def get_tensor_mode(self, name: str) -> str:
        return "INPUT" if name in self._plan["inputs"] else "OUTPUT"

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=self._tensors[name][0])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name][1])

    def is_shape_inference_io(self, name: str) -> bool:
        return name in self._plan.get("shape_tensors", ())

    def get_tensor_format(self, name: str) -> str:
        return "CHW32" if name in self._plan.get("vectorized", ()) else "LINEAR"

    def get_tensor_profile_shape(self, name: str, index: int) -> list[list[int]]:
        shapes: list[list[int]] = self._plan["profiles"][index][name]
        return shapes

    def create_execution_context(self, strategy: str) -> _Context:
        assert strategy in ("STATIC", "ON_PROFILE_CHANGE")
        return _Context(self._machine, self._plan)


def _tensorrt(machine: Machine) -> Any:
    module: Any = ModuleType("tensorrt")
    module.ILogger = _Logger
    module.TensorFormat = SimpleNamespace(LINEAR="LINEAR")
    module.TensorIOMode = SimpleNamespace(INPUT="INPUT", OUTPUT="OUTPUT")
    module.ExecutionContextAllocationStrategy = SimpleNamespace(STATIC="STATIC", ON_PROFILE_CHANGE="ON_PROFILE_CHANGE")
    module.init_libnvinfer_plugins = lambda log, namespace: True

    class Runtime:
        def __init__(self, log: Any) -> None:
            self._log = log

        def deserialize_cuda_engine(self, content: bytes) -> _Engine | None:
            if not content.startswith(b"{"):
                self._log.log(_Logger.Severity.ERROR, "Magic tag does not match")
                self._log.log(_Logger.Severity.WARNING, "a warning")
                return None
            machine.engines.append(machine.current)
            return _Engine(machine, json.loads(content))

    module.Runtime = Runtime
    return module


def write_plan(path: Path, **changes: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(plan(**changes)))
