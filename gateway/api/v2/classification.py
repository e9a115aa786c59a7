"""Triton's classification extension: an output as its highest values and their classes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.tensors import byte_strings
from sluice.serving.tensors.tensor import Array, Tensor

_SUPPORTED = {"UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64"}
_MAX_ELEMENTS = 1_000_000
"""Most elements of an output that is classified: each is sorted, and text is made of it."""


def classify(tensor: Tensor, count: int, labels: Sequence[str], is_batched: bool) -> Tensor:
    """Return the `count` highest values of each row, or all of fewer, as BYTES `value:index[:label]`.

    A row is one item of the batch, flattened; without a batch the whole tensor is one. Equal values come in the order
    of their indices, NaN comes last. Raises INVALID for a type without order in the protocol, and for a tensor that is
    too large.
    """
    if tensor.datatype not in _SUPPORTED:
        message = f"class result not available for output due to unsupported type '{tensor.datatype}'"
        raise SluiceError(ErrorCode.INVALID, message)
    if tensor.num_elements > _MAX_ELEMENTS:
        raise SluiceError(ErrorCode.INVALID, "classification output tensor too large")
    has_rows = is_batched and bool(tensor.shape)
    values = tensor.array
    rows = values.reshape(tensor.shape[0], -1) if has_rows and values.size else values.reshape(1, -1)
    num_classes = min(count, rows.shape[1])
    if len(rows) * num_classes > byte_strings.MAX_ELEMENTS:
        message = f"at most {byte_strings.MAX_ELEMENTS} classes are returned, got a request for {count} of each row"
        raise SluiceError(ErrorCode.INVALID, message)
    classes = np.empty((rows.shape[0], num_classes), np.object_)
    for row, found in zip(rows, classes, strict=True):
        found[:] = [_class(row[index], index, labels) for index in _highest(row)[:num_classes].tolist()]
    shape = (tensor.shape[0], num_classes) if has_rows else (num_classes,)
    return Tensor(tensor.name, "BYTES", shape, array=classes.reshape(shape))


def _highest(row: Array) -> NDArray[np.intp]:
    if row.dtype.kind == "f":
        return np.argsort(-row, kind="stable")
    # Integers cannot be negated without overflow; the reversed order is sorted instead, so that ties stay in order.
    return len(row) - 1 - np.argsort(row[::-1], kind="stable")[::-1]


def _class(value: "np.number[Any]", index: int, labels: Sequence[str]) -> bytes:
    text = f"{value:f}" if isinstance(value, np.floating) else str(value)
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{text}:{index}{label}".encode()
