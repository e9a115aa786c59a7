"""Runs a plan on one GPU: the session and its execution contexts."""

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError, invalid_argument
from sluice.serving.backends.arrays.session import ArraySession, UninterruptibleRun
from sluice.serving.backends.tensorrt.cuda import CudaBuffer
from sluice.serving.backends.tensorrt.engine import OptimizationProfile, PlanEngine, choose_profile, parse_profiles
from sluice.serving.instance import Placement
from sluice.serving.tensors.tensor import Array

_STRATEGY = "execution_context_allocation_strategy"
_STRATEGIES = ("STATIC", "ON_PROFILE_CHANGE")


class PlanSession(ArraySession):
    """One engine with its execution contexts: for each instance one of each profile that the instance is configured
    for.

    A batch gets the profile that fits it best, whichever instance runs it. It waits while other batches use all
    contexts of that profile.
    """

    library = "TensorRT"

    def __init__(self, engine: PlanEngine, config: ModelConfig, placements: Sequence[Placement]) -> None:
        """Create the contexts of `placements`, on a thread. Raises INVALID for unknown profiles, else INTERNAL."""
        self.signature = engine.signature
        self._engine = engine
        strategy = _read_strategy(config)
        indices = [
            index for each in placements for index in parse_profiles(each.profiles, engine.num_profiles, each.name)
        ]
        self._profiles = [engine.profile(index) for index in dict.fromkeys(indices)]
        by_index = {profile.index: profile for profile in self._profiles}
        self._contexts = [ExecutionContext(engine, by_index[index], strategy) for index in indices]
        self._free: dict[int, SimpleQueue[ExecutionContext]] = {index: SimpleQueue() for index in by_index}
        for context in self._contexts:
            self._free[context.profile.index].put(context)

    def open_run(self) -> UninterruptibleRun:
        return UninterruptibleRun(self.run)

    def convert_error(self, error: Exception) -> SluiceError:
        return SluiceError(ErrorCode.INTERNAL, f"TensorRT execute failure: {error}")

    def run(self, inputs: dict[str, Array], outputs: list[str]) -> list[Array]:
        """Return the arrays of `outputs`. Blocks. Raises INVALID for shapes that no profile allows."""
        shapes = {name: array.shape for name, array in inputs.items()}
        free = self._free[choose_profile(self._profiles, shapes, self._engine.model).index]
        context = free.get()
        try:
            return context.run(inputs, outputs)
        finally:
            free.put(context)

    def close(self) -> None:
        for context in self._contexts:
            context.close()


class ExecutionContext:
    """A profile, a stream, and memory for the tensors of one run. One thread at a time may use it."""

    def __init__(self, engine: PlanEngine, profile: OptimizationProfile, strategy: str) -> None:
        """Create the context: call it on a thread. Raises INTERNAL with TensorRT's reason."""
        self.profile = profile
        self._engine = engine
        self._device = engine.device
        self._device.use()
        self._stream: int | None = self._device.create_stream()
        self._context: Any = engine.create_context(strategy)
        try:
            self._context.set_optimization_profile_async(profile.index, self._stream)
        except RuntimeError as error:
            raise engine.last_failure(f"unable to set optimization profile {profile.index}") from error
        self._device.synchronize(self._stream)
        names = (*engine.signature.inputs, *engine.signature.outputs)
        self._buffers = {name: CudaBuffer(self._device) for name in names}

    def run(self, inputs: dict[str, Array], outputs: list[str]) -> list[Array]:
        """Return the arrays of `outputs`. Blocks. Raises INTERNAL with TensorRT's reason."""
        assert self._stream is not None
        self._device.use()
        # Kept until the stream is synchronized, which copies from them.
        given = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        for name, array in given.items():
            self._set_input(name, array, self._stream)
        # TensorRT computes every output, so each needs memory.
        places = {name: self._allocate_output(name) for name in self._engine.signature.outputs}
        if not self._context.execute_async_v3(self._stream):
            raise self._engine.last_failure("failed to execute the plan")
        arrays = [places[name] for name in outputs]
        for name, array in zip(outputs, arrays, strict=True):
            self._device.copy_out(array, self._buffers[name].address(array.nbytes), self._stream)
        self._device.synchronize(self._stream)
        return arrays

    def _set_input(self, name: str, array: Array, stream: int) -> None:
        if not self._context.set_input_shape(name, array.shape):
            raise self._engine.last_failure(f"failed to set the shape of input '{name}' to {list(array.shape)}")
        address = self._buffers[name].address(array.nbytes)
        self._device.copy_in(address, array, stream)
        self._context.set_tensor_address(name, address)

    def _allocate_output(self, name: str) -> Array:
        """Prepare an output: memory on the GPU, and the empty array that it is copied to."""
        shape = tuple(self._context.get_tensor_shape(name))
        if any(size < 0 for size in shape):
            reason = f"output '{name}' of model '{self._engine.model}' has a size that depends on the data"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, f"{reason}, which is not supported")
        array = np.empty(shape, self._engine.signature.outputs[name].data_type.dtype)
        self._context.set_tensor_address(name, self._buffers[name].address(array.nbytes))
        return array

    def close(self) -> None:
        """Free memory and stream. No run may be under way. Idempotent."""
        for buffer in self._buffers.values():
            buffer.close()
        self._context = None
        if self._stream is not None:
            self._device.destroy_stream(self._stream)
            self._stream = None


def _read_strategy(config: ModelConfig) -> str:
    """Return how contexts allocate memory. Raises INVALID for an unknown strategy."""
    if _STRATEGY not in config.parameters:
        return _STRATEGIES[0]
    given = str(config.parameters[_STRATEGY].string_value)
    if given not in _STRATEGIES:
        raise invalid_argument(
            f"Invalid value for '{_STRATEGY}': '{given}' for model instance '{config.name}'. Supported values are "
            "'STATIC' and 'ON_PROFILE_CHANGE'."
        )
    return given
