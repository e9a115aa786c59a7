"""The module that models import as `triton_python_backend_utils`, with NVIDIA's names."""

import sys
from collections.abc import Callable
from enum import IntEnum

from sluice.serving.backends.python.worker.calls import ResponseIterator
from sluice.serving.backends.python.worker.errors import TritonError, TritonErrorCode, TritonModelException, check_text
from sluice.serving.backends.python.worker.model_config import (
    ModelConfig,
    get_input_config_by_name,
    get_output_config_by_name,
    using_decoupled_model_transaction_policy,
)
from sluice.serving.backends.python.worker.request import (
    RELEASE_ALL,
    RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceTrace,
)
from sluice.serving.backends.python.worker.response import (
    RESPONSE_COMPLETE_FINAL,
    InferenceResponse,
    InferenceResponseSender,
)
from sluice.serving.backends.python.worker.server import (
    Metric,
    MetricFamily,
    MetricKind,
    is_model_ready,
    load_model,
    unload_model,
)
from sluice.serving.backends.python.worker.tensor import (
    TRITON_STRING_TO_NUMPY,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from sluice.serving.backends.python.worker.tensor import PbTensor as Tensor

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = RESPONSE_COMPLETE_FINAL
TRITONSERVER_REQUEST_RELEASE_ALL = RELEASE_ALL
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = RELEASE_RESCHEDULE


class MemoryType(IntEnum):
    """Kinds of memory, with Triton's values."""

    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_CPU_PINNED = 1
    TRITONSERVER_MEMORY_GPU = 2


TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_CPU_PINNED = MemoryType.TRITONSERVER_MEMORY_CPU_PINNED
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
_folder = ""


class _LogLevel(IntEnum):
    """Levels with the values of `logging`, which is not imported because that is slow."""

    VERBOSE = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


class Logger:
    """Writes the model's lines to the server's log. Has only class methods, as in Triton."""

    LogLevel = _LogLevel
    VERBOSE = _LogLevel.VERBOSE
    INFO = _LogLevel.INFO
    WARNING = _LogLevel.WARNING
    ERROR = _LogLevel.ERROR

    _write: Callable[[int, str, str], None] | None = None

    @classmethod
    def log(cls, message: str, level: _LogLevel = _LogLevel.INFO) -> None:
        """Write a line. Raises TypeError for an invalid message or level."""
        if not isinstance(level, _LogLevel):
            raise TypeError(f"level is one of Logger.LogLevel, not {level!r}")
        cls._log(level, message)

    @classmethod
    def log_info(cls, message: str) -> None:
        cls._log(_LogLevel.INFO, message)

    @classmethod
    def log_warn(cls, message: str) -> None:
        cls._log(_LogLevel.WARNING, message)

    @classmethod
    def log_error(cls, message: str) -> None:
        cls._log(_LogLevel.ERROR, message)

    @classmethod
    def log_verbose(cls, message: str) -> None:
        cls._log(_LogLevel.VERBOSE, message)

    @classmethod
    def _log(cls, level: int, message: str) -> None:
        if cls._write is None:
            raise RuntimeError("the logger works in a worker process only")
        caller = sys._getframe(2)
        file = caller.f_code.co_filename.rpartition("/")[2]
        cls._write(int(level), f"{file}:{caller.f_lineno}", check_text(message, "message"))


def get_model_dir() -> str:
    """Return the folder of the model's version."""
    return _folder


def set_model_dir(folder: str) -> None:
    """Set the folder of the model's version. The worker does so once."""
    global _folder
    _folder = folder


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    return next((each for each in inference_request.inputs() if each.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    return next((each for each in inference_response.output_tensors() if each.name() == name), None)


class PreferredMemory:
    """A model's preference for its outputs' memory. It changes nothing: tensors are always in the CPU's."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_CPU_PINNED",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonErrorCode",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]
