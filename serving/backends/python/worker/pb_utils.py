"""The module that models import as `triton_python_backend_utils`; its names are NVIDIA's."""

from enum import IntEnum

from serving.backends.python.worker.calls import ResponseIterator
from serving.backends.python.worker.errors import TritonError, TritonErrorCode, TritonModelException
from serving.backends.python.worker.logger import Logger
from serving.backends.python.worker.metrics import Metric, MetricFamily, MetricKind
from serving.backends.python.worker.model_config import (
    ModelConfig,
    get_input_config_by_name,
    get_output_config_by_name,
    using_decoupled_model_transaction_policy,
)
from serving.backends.python.worker.numpy_types import (
    TRITON_STRING_TO_NUMPY,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from serving.backends.python.worker.repository import is_model_ready, load_model, unload_model
from serving.backends.python.worker.request import InferenceRequest, InferenceTrace
from serving.backends.python.worker.response import InferenceResponse, InferenceResponseSender
from serving.backends.python.worker.tensor import Tensor

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2


class MemoryType(IntEnum):
    """Where memory lies; values are the server's."""

    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_CPU_PINNED = 1
    TRITONSERVER_MEMORY_GPU = 2


TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_CPU_PINNED = MemoryType.TRITONSERVER_MEMORY_CPU_PINNED
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU

_folder = ""


def get_model_dir() -> str:
    """The folder of the model's version."""
    return _folder


def set_model_dir(folder: str) -> None:
    """Called once, by the worker."""
    global _folder
    _folder = folder


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The input of that name; None where the request has none."""
    for tensor in inference_request.inputs():
        if tensor.name() == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The output of that name; None where the response has none."""
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None


class PreferredMemory:
    """Where a model would like its outputs: everything lies in the CPU's memory here, so it changes nothing."""

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
