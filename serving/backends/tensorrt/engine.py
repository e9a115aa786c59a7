"""A plan that is deserialized on one GPU: its signature and its optimization profiles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.errors import ErrorCode, SluiceError, invalid_argument
from sluice.serving.backends.arrays.session import Signature, TensorSignature
from sluice.serving.backends.tensorrt.cuda import CudaDevice
from sluice.serving.tensors.datatypes import DATA_TYPES, DataType
from sluice.serving.tensors.tensor import format_shape

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
"""Data types by TensorRT's names."""
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorRtModules:
    """The modules `tensorrt` and `cuda.bindings.runtime`."""

    tensorrt: Any
    cuda: Any


def import_modules() -> TensorRtModules:
    """Import the modules. This takes seconds: call it on a thread. Raises UNAVAILABLE where one is broken."""
    try:
        import tensorrt
        from cuda.bindings import runtime
    except ImportError as error:
        raise SluiceError(ErrorCode.UNAVAILABLE, f"TensorRT cannot be imported: {error}") from error
    return TensorRtModules(tensorrt, runtime)


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """Range of shapes of one input, and the shape that the engine was optimized for."""

    smallest: Shape
    optimal: Shape
    largest: Shape

    def misfit(self, shape: Shape) -> int | None:
        """Return the first dimension that is out of range; None where all are within it."""
        if len(shape) != len(self.smallest):
            return min(len(shape), len(self.smallest))
        bounds = zip(shape, self.smallest, self.largest, strict=True)
        return next((index for index, (size, low, high) in enumerate(bounds) if not low <= size <= high), None)

    def distance(self, shape: Shape) -> int:
        """Return the distance from the optimal shape, summed over the dimensions."""
        return sum(abs(size - optimal) for size, optimal in zip(shape, self.optimal, strict=True))


@dataclass(frozen=True, slots=True)
class OptimizationProfile:
    index: int
    ranges: Mapping[str, ShapeRange]
    """Shape ranges by input."""

    def fits(self, shapes: Mapping[str, Shape]) -> bool:
        return all(self.ranges[name].misfit(shape) is None for name, shape in shapes.items())

    def distance(self, shapes: Mapping[str, Shape]) -> int:
        return sum(self.ranges[name].distance(shape) for name, shape in shapes.items())


class PlanEngine:
    """A deserialized plan. Its weights are in memory once, for any number of contexts."""

    def __init__(self, path: Path, model: str, modules: TensorRtModules, gpu: int) -> None:
        """Read the file, on a thread. Raises INTERNAL with TensorRT's reason, UNIMPLEMENTED for unsupported tensors."""
        self.modules = modules
        self.model = model
        self.device = CudaDevice(modules.cuda, gpu)
        self.device.use()
        self._log = _new_log(modules.tensorrt)
        # Plans may use the plugins that come with TensorRT.
        modules.tensorrt.init_libnvinfer_plugins(self._log, "")
        self._runtime = modules.tensorrt.Runtime(self._log)
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise self.last_failure("unable to create TensorRT engine")
        self.signature = self._read_signature()

    @property
    def num_profiles(self) -> int:
        return int(self._engine.num_optimization_profiles)

    def profile(self, index: int) -> OptimizationProfile:
        shapes = {name: self._engine.get_tensor_profile_shape(name, index) for name in self.signature.inputs}
        return OptimizationProfile(index, {name: ShapeRange(*map(tuple, each)) for name, each in shapes.items()})

    def create_context(self, strategy: str) -> Any:
        """Create an execution context. `strategy` is how it allocates memory, as TensorRT names it."""
        chosen = getattr(self.modules.tensorrt.ExecutionContextAllocationStrategy, strategy)
        context = self._engine.create_execution_context(chosen)
        if context is None:
            raise self.last_failure("unable to create TensorRT context")
        return context

    def last_failure(self, what: str) -> SluiceError:
        """Return an error with the last message that TensorRT has logged: its functions return none."""
        return SluiceError(ErrorCode.INTERNAL, f"{what}: {self._log.last_error or 'TensorRT gives no reason'}")

    def _read_signature(self) -> Signature:
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        modes = self.modules.tensorrt.TensorIOMode
        inputs = [name for name in names if self._engine.get_tensor_mode(name) == modes.INPUT]
        tensors = {name: self._read_tensor(name) for name in names}
        return Signature({name: tensors.pop(name) for name in inputs}, {}, tensors)

    def _read_tensor(self, name: str) -> TensorSignature:
        if self._engine.is_shape_inference_io(name):
            reason = f"unable to load model '{self.model}', tensor '{name}' is a shape tensor, which is not supported"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, reason)
        if self._engine.get_tensor_format(name) != self.modules.tensorrt.TensorFormat.LINEAR:
            reason = f"unable to load model '{self.model}', tensor '{name}' has another format than linear"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, f"{reason}, which is not supported")
        return TensorSignature(name, self._read_data_type(name), tuple(self._engine.get_tensor_shape(name)))

    def _read_data_type(self, name: str) -> DataType:
        kind = self._engine.get_tensor_dtype(name).name
        if kind not in _TYPES:
            reason = f"unable to load model '{self.model}', unsupported datatype {kind} for tensor '{name}'"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, reason)
        return _TYPES[kind]


def _new_log(tensorrt: Any) -> Any:
    """Create a logger for TensorRT that keeps the last error."""

    class Log(tensorrt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            tensorrt.ILogger.__init__(self)
            self.last_error = ""

        def log(self, severity: Any, message: str) -> None:
            if severity in (tensorrt.ILogger.Severity.ERROR, tensorrt.ILogger.Severity.INTERNAL_ERROR):
                self.last_error = message

    return Log()


def choose_profile(
    profiles: Sequence[OptimizationProfile], shapes: Mapping[str, Shape], model: str
) -> OptimizationProfile:
    """Return the fitting profile with the nearest optimal shapes, as Triton does. Raises INVALID where none fits."""
    fitting = [profile for profile in profiles if profile.fits(shapes)]
    if fitting:
        return min(fitting, key=lambda profile: profile.distance(shapes))
    if len(profiles) > 1:
        names = " ".join(f"{profile.index}[{profile.index}]" for profile in profiles)
        reason = f"failed to find any Optimization Profile among [ {names}] to support the requested dimensions"
        raise invalid_argument(f"{reason}: {_format_shapes(shapes)}")
    raise _misfit(profiles[0], shapes, model)


def parse_profiles(names: Sequence[str], num_profiles: int, instance: str) -> list[int]:
    """Parse `profile` of a group into distinct indices; by default the first. Raises INVALID for unknown ones."""
    indexes = [_parse_index(name) for name in names] or [0]
    for index in indexes:
        if not 0 <= index < num_profiles:
            raise invalid_argument(
                f"Can not set the specified optimization profile {index}[{index}] for {instance}. Expected "
                f"optimization profile index range 0-{num_profiles - 1}"
            )
    return list(dict.fromkeys(indexes))


def _parse_index(name: str) -> int:
    if not name.isdecimal():
        raise invalid_argument(f"unable to parse '{name}': optimization profiles have numbers")
    return int(name)


def _misfit(profile: OptimizationProfile, shapes: Mapping[str, Shape], model: str) -> SluiceError:
    for name, shape in shapes.items():
        allowed = profile.ranges[name]
        dimension = allowed.misfit(shape)
        if dimension is None:
            continue
        begin = f"request specifies invalid shape for input '{name}' for {model}. Error details: model expected"
        if len(shape) != len(allowed.smallest):
            details = f"{len(allowed.smallest)} dimensions but received {len(shape)}"
        else:
            details = (
                f"the shape of dimension {dimension} to be between {allowed.smallest[dimension]} and "
                f"{allowed.largest[dimension]} but received {shape[dimension]}"
            )
        return SluiceError(ErrorCode.INVALID, f"{begin} {details}", param=name)
    raise AssertionError("all shapes fit")


def _format_shapes(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name} {format_shape(shape)}" for name, shape in shapes.items())
