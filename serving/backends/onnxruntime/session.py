"""An open ONNX model: its signature and its runs."""

import ctypes
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.arrays.session import ArrayRun, ArraySession, Signature, TensorSignature
from sluice.serving.backends.onnxruntime.options import (
    Provider,
    build_run_options,
    build_session_options,
    read_run_entries,
)
from sluice.serving.tensors.datatypes import DATA_TYPES, DataType
from sluice.serving.tensors.tensor import Array

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, NodeArg, OrtValue, RunOptions

_BF16 = DATA_TYPES["BF16"]
_ONNX_BF16 = 16
"""Number of TensorProto.BFLOAT16."""
_OWN_NAMES = {"float32": "float", "float64": "double", "object": "string"}
"""onnxruntime's names of element types, where they are not numpy's."""
_ELEMENT_TYPES = {_OWN_NAMES.get(each.dtype.name, each.dtype.name): each for each in DATA_TYPES.values()}
_CONTAINERS = {"seq": "SEQUENCE", "map": "MAP", "sparse_tensor": "SPARSETENSOR", "optional": "OPTIONAL"}
_ERROR_PATTERN = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)
_INVALID_ARGUMENT = "2"


class OnnxRun(ArrayRun):
    """One run, whose options can stop it at the next operator."""

    can_stop = True

    def __init__(self, session: "OnnxSession", entries: dict[str, str]) -> None:
        self._session = session
        self._options = build_run_options(entries)

    def execute(self, inputs: dict[str, Array], outputs: list[str]) -> list[Array]:
        return self._session.run(inputs, outputs, self._options)

    def stop(self) -> None:
        self.is_stopped = self._options.terminate = True


class OnnxSession(ArraySession):
    """An ONNX model that is open in onnxruntime."""

    library = "onnxruntime"
    strings_are_text = True

    def __init__(self, path: Path, config: ModelConfig, providers: Sequence[Provider], num_threads: int = 0) -> None:
        """Open the file, on a thread. `num_threads` as in `build_session_options`. Raises onnxruntime's reason."""
        import onnxruntime

        try:
            options = build_session_options(config, num_threads)
            self._session: InferenceSession | None = onnxruntime.InferenceSession(
                str(path), sess_options=options, providers=list(providers)
            )
        except SluiceError:
            raise
        except Exception as error:
            raise convert_error(error) from error
        self.signature: Signature = read_signature(self._session)
        tensors = (*self.signature.inputs.values(), *self.signature.outputs.values())
        self._entries = read_run_entries(config)
        # numpy has no bfloat16 that onnxruntime takes: such a model's tensors go as onnxruntime's own values.
        self._needs_values = any(tensor.data_type is _BF16 for tensor in tensors)

    def open_run(self) -> OnnxRun:
        return OnnxRun(self, self._entries)

    def convert_error(self, error: Exception) -> SluiceError:
        return convert_error(error)

    def close(self) -> None:
        self._session = None

    def run(self, inputs: dict[str, Array], outputs: list[str], options: "RunOptions") -> list[Array]:
        """Return the arrays of `outputs`. BYTES are object arrays of `str`, BF16 arrays have the dtype of ml_dtypes.

        Blocks; setting `options.terminate` ends it early. Raises what onnxruntime raises.
        """
        session = self._session
        assert session is not None, "the session is closed"
        if not self._needs_values:
            arrays: list[Array] = session.run(outputs, inputs, options)
            return arrays
        values = {name: _to_ort_value(array) for name, array in inputs.items()}
        return [_to_array(value) for value in session.run_with_ort_values(outputs, values, options)]


def read_signature(session: "InferenceSession") -> Signature:
    """Return a model's signature. Raises UNIMPLEMENTED for what is no tensor or of a type the protocol lacks."""
    return Signature(
        _read_tensors(session.get_inputs()),
        _read_tensors(session.get_overridable_initializers()),
        _read_tensors(session.get_outputs()),
    )


def _read_tensors(nodes: "Iterable[NodeArg]") -> dict[str, TensorSignature]:
    return {node.name: TensorSignature(node.name, _read_data_type(node), _read_dims(node.shape)) for node in nodes}


def _read_dims(shape: Iterable[object]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) and size >= 0 else -1 for size in shape)


def _read_data_type(node: "NodeArg") -> DataType:
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


def _to_ort_value(array: Array) -> "OrtValue":
    from onnxruntime import OrtValue

    if array.dtype == _BF16.dtype:
        bits = np.ascontiguousarray(array).view(np.uint16)
        return OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BF16)
    return OrtValue.ortvalue_from_numpy(array)


def _to_array(value: Any) -> Array:
    if value.data_type() != "tensor(bfloat16)":
        array: Array = value.numpy()
        return array
    copied = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(copied, ml_dtypes.bfloat16).reshape(value.shape())


def convert_error(error: Exception) -> SluiceError:
    """Convert onnxruntime's error to INVALID where it blames its inputs, else to INTERNAL. Keeps its message."""
    found = _ERROR_PATTERN.fullmatch(str(error))
    if found is None:
        return SluiceError(ErrorCode.INTERNAL, f"onnx runtime error: {error}")
    code = ErrorCode.INVALID if found[1] == _INVALID_ARGUMENT else ErrorCode.INTERNAL
    return SluiceError(code, f"onnx runtime error {found[1]}: {found[2]}")
