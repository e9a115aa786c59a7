"""What an ONNX model takes and gives."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from serving.backends.arrays.signature import Signature, TensorSignature
from serving.tensors.datatypes import BYTES, DATA_TYPES, DataType
from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, NodeArg

_ELEMENT_TYPES: dict[str, DataType] = {
    "bool": DATA_TYPES["BOOL"],
    "uint8": DATA_TYPES["UINT8"],
    "uint16": DATA_TYPES["UINT16"],
    "uint32": DATA_TYPES["UINT32"],
    "uint64": DATA_TYPES["UINT64"],
    "int8": DATA_TYPES["INT8"],
    "int16": DATA_TYPES["INT16"],
    "int32": DATA_TYPES["INT32"],
    "int64": DATA_TYPES["INT64"],
    "float16": DATA_TYPES["FP16"],
    "float": DATA_TYPES["FP32"],
    "double": DATA_TYPES["FP64"],
    "bfloat16": DATA_TYPES["BF16"],
    "string": BYTES,
}
_CONTAINERS = {"seq": "SEQUENCE", "map": "MAP", "sparse_tensor": "SPARSETENSOR", "optional": "OPTIONAL"}


def signature_of(session: "InferenceSession") -> Signature:
    """Raises SluiceError UNIMPLEMENTED for what is no tensor, or of a type that the protocol lacks."""
    return Signature(
        _tensors(session.get_inputs()),
        _tensors(session.get_overridable_initializers()),
        _tensors(session.get_outputs()),
    )


def _tensors(nodes: "Iterable[NodeArg]") -> dict[str, TensorSignature]:
    return {node.name: TensorSignature(node.name, _data_type(node), _dims(node.shape)) for node in nodes}


def _dims(shape: Iterable[object]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) and size >= 0 else -1 for size in shape)


def _data_type(node: "NodeArg") -> DataType:
    found = re.fullmatch(r"(\w+)\((.*)\)", node.type)
    kind, element = (found[1], found[2]) if found else ("", "")
    if kind != "tensor":
        raise SluiceError(
            ErrorCode.UNIMPLEMENTED,
            f"Unsupported ONNX Type 'ONNX_TYPE_{_CONTAINERS.get(kind, 'UNKNOWN')}' for I/O '{node.name}', "
            "expected 'ONNX_TYPE_TENSOR'.",
        )
    if element not in _ELEMENT_TYPES:
        raise SluiceError(ErrorCode.UNIMPLEMENTED, f"unsupported datatype {element} for I/O '{node.name}'")
    return _ELEMENT_TYPES[element]
