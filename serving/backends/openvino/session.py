"""A compiled OpenVINO model, its runs and its errors."""

import re
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.arrays.session import ArrayRun, ArraySession, Signature
from sluice.serving.tensors.tensor import Array

if TYPE_CHECKING:
    from openvino import CompiledModel, InferRequest, Tensor

_LOCATION = re.compile(r"^(?:Exception from .*:|Check '.*' failed at .*:|Caught exception:\s*)\s*", re.MULTILINE)
_UNCONVERTED = re.compile(r"(?:No conversion rule found for operations|Conversion is failed for): (.+)")


class OpenVinoRun(ArrayRun):
    """One run. It has one of its session's infer requests while it executes."""

    can_stop = True

    def __init__(self, session: "OpenVinoSession") -> None:
        self._session = session
        self._request: InferRequest | None = None
        self._lock = Lock()
        """Held to cancel `_request` and to return it, so that a cancellation cannot hit the request's next run."""

    def execute(self, inputs: dict[str, Array], outputs: list[str]) -> list[Array]:
        rows = next((len(array) for array in inputs.values() if array.ndim), 0)
        request = self._request = self._session.take_request()
        try:
            self._session.fill(request, inputs, rows)
            self._infer(request)
            return self._session.results(request, outputs, rows)
        finally:
            with self._lock:
                self._request = None
            self._session.return_request(request)

    def _infer(self, request: "InferRequest") -> None:
        request.start_async()
        if self.is_stopped:
            # A cancellation that came before the start found nothing to cancel.
            request.cancel()
        request.wait()

    def stop(self) -> None:
        with self._lock:
            self.is_stopped = True
            if self._request is not None:
                self._request.cancel()


class OpenVinoSession(ArraySession):
    """A compiled model. Each concurrent run has its own infer request, and so its own memory for tensors."""

    library = "OpenVINO"

    def __init__(
        self, compiled: "CompiledModel", signature: Signature, fixed_batch: int = 0, *, pads_batches: bool = False
    ) -> None:
        """`fixed_batch` is the only batch size the model takes, 0 for any; smaller batches are padded or refused."""
        self.signature = signature
        self._compiled: CompiledModel | None = compiled
        self._fixed_batch = fixed_batch
        self._pads_batches = pads_batches
        self._inputs: Mapping[str, int] = {name: index for index, name in enumerate(signature.inputs)}
        self._outputs: Mapping[str, int] = {name: index for index, name in enumerate(signature.outputs)}
        self._idle: list[InferRequest] = []

    def open_run(self) -> OpenVinoRun:
        return OpenVinoRun(self)

    def convert_error(self, error: Exception) -> SluiceError:
        return convert_error(error, "running inference")

    def close(self) -> None:
        self._idle.clear()
        self._compiled = None

    def take_request(self) -> "InferRequest":
        """Return an idle infer request, or a new one. There are never more than instances."""
        try:
            return self._idle.pop()
        except IndexError:
            assert self._compiled is not None, "the session is closed"
            return self._compiled.create_infer_request()

    def return_request(self, request: "InferRequest") -> None:
        self._idle.append(request)

    def fill(self, request: "InferRequest", inputs: Mapping[str, Array], rows: int) -> None:
        """Copy the inputs into the request's memory. Raises INVALID for shapes that do not fit."""
        missing = self._missing_rows(rows)
        for name, array in inputs.items():
            try:
                _fill(request, self._inputs[name], _pad(array, missing) if missing else array)
            except RuntimeError as error:
                message = f"input '{name}' does not fit the model: {extract_message(error)}"
                raise SluiceError(ErrorCode.INVALID, message, param=name) from None

    def _missing_rows(self, rows: int) -> int:
        missing = self._fixed_batch - rows if self._fixed_batch else 0
        if missing and not self._pads_batches:
            raise SluiceError(
                ErrorCode.INTERNAL,
                f"expected requests with batch size '{self._fixed_batch}', got '{rows}'... this error can be avoided "
                "by setting 'ENABLE_BATCH_PADDING' parameter in model configuration to 'YES' at a performance cost.",
            )
        return missing

    def results(self, request: "InferRequest", outputs: Sequence[str], rows: int) -> list[Array]:
        """Return copies of the outputs, because the request's next run overwrites its memory."""
        arrays = [_copy_output(request.get_output_tensor(self._outputs[name])) for name in outputs]
        return [array[:rows] for array in arrays] if self._fixed_batch else arrays


def _pad(array: Array, num_rows: int) -> Array:
    filler = np.full((num_rows, *array.shape[1:]), b"" if array.dtype == np.object_ else 0, array.dtype)
    return np.concatenate([array, filler])


def _fill(request: "InferRequest", index: int, array: Array) -> None:
    if array.dtype == np.object_:
        request.set_input_tensor(index, _string_tensor(array))
        return
    tensor = request.get_input_tensor(index)
    if tuple(tensor.shape) != array.shape:
        tensor.shape = array.shape
    if array.size:
        place = tensor.data
        place[...] = array.view(place.dtype) if array.dtype == ml_dtypes.bfloat16 else array


def _string_tensor(array: Array) -> "Tensor":
    from openvino import Shape, Tensor, Type

    if not array.size:
        return Tensor(Type.string, Shape(array.shape))
    tensor = Tensor(array.ravel().tolist())
    tensor.shape = array.shape
    return tensor


def _copy_output(tensor: "Tensor") -> Array:
    element = tensor.element_type.get_type_name()
    if element == "string":
        strings: Array = tensor.bytes_data.astype(np.object_)
        return strings
    array: Array = np.array(tensor.data)
    # OpenVINO shows bfloat16 as an array of 16-bit floats of the other kind.
    return array.view(ml_dtypes.bfloat16) if element == "bf16" else array


def convert_error(error: Exception, doing: str) -> SluiceError:
    """Convert an error to INTERNAL. `doing` is in Triton's words: reading model, loading model …"""
    return SluiceError(ErrorCode.INTERNAL, f"openvino error in {doing} : {extract_message(error)}")


def convert_read_error(error: Exception) -> SluiceError:
    """Convert an error of reading to UNIMPLEMENTED for operations that OpenVINO lacks, else to INTERNAL."""
    found = _UNCONVERTED.search(str(error))
    if found is None:
        return convert_error(error, "reading model")
    return SluiceError(ErrorCode.UNIMPLEMENTED, f"OpenVINO cannot convert these operations of the model: {found[1]}")


def extract_message(error: Exception) -> str:
    """Return the error's message in one line, without the source locations that it begins with."""
    return " ".join(_LOCATION.sub("", str(error)).split())
