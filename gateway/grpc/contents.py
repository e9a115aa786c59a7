"""Tensors written as protobuf fields (`InferTensorContents`), as the bytes that they stand for."""

from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from serving.tensors import byte_strings
from serving.tensors.datatypes import DATA_TYPES
from sluice.errors import ErrorCode, SluiceError

_FIELDS = {
    "bool_contents": ("BOOL", ("BOOL",)),
    "int_contents": ("INT32", ("INT32", "INT16", "INT8")),
    "int64_contents": ("INT64", ("INT64",)),
    "uint_contents": ("UINT32", ("UINT32", "UINT16", "UINT8")),
    "uint64_contents": ("UINT64", ("UINT64",)),
    "fp32_contents": ("FP32", ("FP32",)),
    "fp64_contents": ("FP64", ("FP64",)),
    "bytes_contents": ("BYTES", ("BYTES",)),
}
"""By field: the type that it is of, and the types whose tensors may be written in it."""


def wire_form(tensor: "service_pb2.ModelInferRequest.InferInputTensor", model: str) -> bytes:
    """The raw bytes of a tensor that has contents. Raises INVALID for contents that are not of its type."""
    given = [field.name for field, _ in tensor.contents.ListFields()]
    if not given:
        return b""
    own_type, allowed = _FIELDS[given[0]]
    if tensor.datatype not in allowed:
        raise _unexpected(tensor, model, f" of type '{own_type}', expected datatype '{tensor.datatype}'")
    if len(given) > 1:
        raise _unexpected(tensor, model, ", binary data was already supplied.")
    values = getattr(tensor.contents, given[0])
    if own_type == "BYTES":
        return byte_strings.pack(values)
    return _packed(values, own_type, tensor, model)


def _packed(values: Any, own_type: str, tensor: Any, model: str) -> bytes:
    """Narrow integers travel in wider fields: what does not fit is refused, where Triton lets it overflow."""
    array = np.array(values, DATA_TYPES[own_type].dtype)
    if tensor.datatype == own_type:
        return array.tobytes()
    narrow = array.astype(DATA_TYPES[tensor.datatype].dtype)
    if not np.array_equal(narrow, array):
        value = array[narrow != array][0]
        raise _unexpected(tensor, model, f": {value} is out of range for datatype '{tensor.datatype}'")
    return narrow.tobytes()


def _unexpected(tensor: Any, model: str, what: str) -> SluiceError:
    message = f"unexpected explicit tensor data for input tensor '{tensor.name}' for model '{model}'{what}"
    return SluiceError(ErrorCode.INVALID, message, param=tensor.name)
