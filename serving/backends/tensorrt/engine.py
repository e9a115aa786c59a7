"""A plan that is deserialized on one GPU: what it takes and gives, and its profiles."""

from pathlib import Path
from typing import Any

from serving.backends.arrays.signature import Signature, TensorSignature
from serving.backends.tensorrt.cuda import Device
from serving.backends.tensorrt.libraries import Libraries
from serving.backends.tensorrt.profiles import Profile, ShapeRange
from serving.tensors.datatypes import DATA_TYPES, DataType
from sluice.errors import ErrorCode, SluiceError

_TYPES = {
    "FLOAT": DATA_TYPES["FP32"],
    "HALF": DATA_TYPES["FP16"],
    "BF16": DATA_TYPES["BF16"],
    "INT8": DATA_TYPES["INT8"],
    "UINT8": DATA_TYPES["UINT8"],
    "INT32": DATA_TYPES["INT32"],
    "INT64": DATA_TYPES["INT64"],
    "BOOL": DATA_TYPES["BOOL"],
}
"""By TensorRT's names."""


class Engine:
    """Its weights are there once, for any number of contexts."""

    def __init__(self, path: Path, model: str, libraries: Libraries, gpu: int) -> None:
        """Reads the file: for a thread. Raises SluiceError INTERNAL with TensorRT's reason, UNIMPLEMENTED for a tensor
        that Sluice cannot give or take.
        """
        self.libraries = libraries
        self.model = model
        self.device = Device(libraries.cuda, gpu)
        self.device.use()
        self._log = _new_log(libraries.tensorrt)
        # Plans name the plugins that come with TensorRT.
        libraries.tensorrt.init_libnvinfer_plugins(self._log, "")
        self._runtime = libraries.tensorrt.Runtime(self._log)
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise self.failure("unable to create TensorRT engine")
        self.signature = self._signature()

    @property
    def num_profiles(self) -> int:
        return int(self._engine.num_optimization_profiles)

    def profile(self, index: int) -> Profile:
        """The shapes that it allows, by input."""
        shapes = {name: self._engine.get_tensor_profile_shape(name, index) for name in self.signature.inputs}
        return Profile(index, {name: ShapeRange(*map(tuple, each)) for name, each in shapes.items()})

    def new_context(self, strategy: str) -> Any:
        """An execution context; `strategy` is how it holds memory, in TensorRT's words."""
        chosen = getattr(self.libraries.tensorrt.ExecutionContextAllocationStrategy, strategy)
        context = self._engine.create_execution_context(chosen)
        if context is None:
            raise self.failure("unable to create TensorRT context")
        return context

    def failure(self, what: str) -> SluiceError:
        """With the last error that TensorRT has logged: its functions give none."""
        return SluiceError(ErrorCode.INTERNAL, f"{what}: {self._log.last_error or 'TensorRT gives no reason'}")

    def _signature(self) -> Signature:
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        modes = self.libraries.tensorrt.TensorIOMode
        inputs = [name for name in names if self._engine.get_tensor_mode(name) == modes.INPUT]
        tensors = {name: self._tensor(name) for name in names}
        return Signature({name: tensors.pop(name) for name in inputs}, {}, tensors)

    def _tensor(self, name: str) -> TensorSignature:
        if self._engine.is_shape_inference_io(name):
            reason = f"unable to load model '{self.model}', tensor '{name}' is a shape tensor, which is not supported"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, reason)
        if self._engine.get_tensor_format(name) != self.libraries.tensorrt.TensorFormat.LINEAR:
            reason = f"unable to load model '{self.model}', tensor '{name}' has another format than linear"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, f"{reason}, which is not supported")
        return TensorSignature(name, self._data_type(name), tuple(self._engine.get_tensor_shape(name)))

    def _data_type(self, name: str) -> DataType:
        kind = self._engine.get_tensor_dtype(name).name
        if kind not in _TYPES:
            reason = f"unable to load model '{self.model}', unsupported datatype {kind} for tensor '{name}'"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, reason)
        return _TYPES[kind]


def _new_log(tensorrt: Any) -> Any:
    """TensorRT's log, of which the last error is kept."""

    class Log(tensorrt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            tensorrt.ILogger.__init__(self)
            self.last_error = ""

        def log(self, severity: Any, message: str) -> None:
            if severity in (tensorrt.ILogger.Severity.ERROR, tensorrt.ILogger.Severity.INTERNAL_ERROR):
                self.last_error = message

    return Log()
