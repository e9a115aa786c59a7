"""An ONNX model that is open: arrays in, arrays out."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backends.arrays.session import ArrayRun, ArraySession
from serving.backends.arrays.signature import Signature
from serving.backends.onnxruntime.failures import failure_of
from serving.backends.onnxruntime.options import run_entries, run_options, session_options
from serving.backends.onnxruntime.signature import signature_of
from serving.spec import ModelSource
from serving.tensors.datatypes import DATA_TYPES
from serving.tensors.tensor import Array
from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, OrtValue, RunOptions

Provider = str | tuple[str, dict[str, str]]
_BF16 = DATA_TYPES["BF16"]
_ONNX_BF16 = 16
"""TensorProto.BFLOAT16."""


class OnnxRun(ArrayRun):
    """One run: its options can end it at the next operator."""

    def __init__(self, session: "OnnxSession", entries: dict[str, str]) -> None:
        self._session = session
        self._options = run_options(entries)

    def execute(self, inputs: dict[str, Array], outputs: list[str]) -> list[Array]:
        return self._session.run(inputs, outputs, self._options)

    def stop(self) -> None:
        self._options.terminate = True

    @property
    def is_stopped(self) -> bool:
        return bool(self._options.terminate)


class OnnxSession(ArraySession):
    """An ONNX model that is open."""

    library = "onnxruntime"
    strings_are_text = True

    def __init__(self, path: Path, config: ModelConfig, providers: Sequence[Provider], num_threads: int = 0) -> None:
        """Reads the file: for a thread. Raises SluiceError with onnxruntime's reason.

        `num_threads` within an operator, where the configuration says nothing; 0 is onnxruntime's own choice.
        """
        import onnxruntime

        try:
            options = session_options(config, num_threads)
            self._session: InferenceSession | None = onnxruntime.InferenceSession(
                str(path), sess_options=options, providers=list(providers)
            )
        except SluiceError:
            raise
        except Exception as error:
            raise failure_of(error) from error
        self.signature: Signature = signature_of(self._session)
        tensors = (*self.signature.inputs.values(), *self.signature.outputs.values())
        self._entries = run_entries(config)
        # numpy has no bfloat16 that onnxruntime takes: such a model's tensors go as onnxruntime's own values.
        self._needs_values = any(tensor.data_type is _BF16 for tensor in tensors)

    def open_run(self) -> OnnxRun:
        return OnnxRun(self, self._entries)

    def failure_of(self, error: Exception) -> SluiceError:
        return failure_of(error)

    def close(self) -> None:
        self._session = None

    def run(self, inputs: dict[str, Array], outputs: list[str], options: "RunOptions") -> list[Array]:
        """The arrays of `outputs`. BYTES are object arrays of `str`, BF16 has ml_dtypes' type.

        Blocks; setting `options.terminate` ends it early. Raises what onnxruntime raises.
        """
        session = self._session
        assert session is not None, "the session is closed"
        if not self._needs_values:
            arrays: list[Array] = session.run(outputs, inputs, options)
            return arrays
        values = {name: _value_of(array) for name, array in inputs.items()}
        return [_array_of(value) for value in session.run_with_ort_values(outputs, values, options)]


def model_path(source: ModelSource) -> Path:
    """The file to open: of a folder, the model.onnx in it. Raises SluiceError UNAVAILABLE."""
    path = source.model_file if source.config.default_model_filename else source.version_folder / "model.onnx"
    if path.is_dir():
        path = path / "model.onnx"
    if not path.exists():
        raise SluiceError(ErrorCode.UNAVAILABLE, f"unable to find '{path}' for model instance '{source.name}'")
    return path


def _value_of(array: Array) -> "OrtValue":
    from onnxruntime import OrtValue

    if array.dtype == _BF16.dtype:
        bits = np.ascontiguousarray(array).view(np.uint16)
        return OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BF16)
    return OrtValue.ortvalue_from_numpy(array)


def _array_of(value: Any) -> Array:
    if value.data_type() != "tensor(bfloat16)":
        array: Array = value.numpy()
        return array
    copied = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(copied, ml_dtypes.bfloat16).reshape(value.shape())
