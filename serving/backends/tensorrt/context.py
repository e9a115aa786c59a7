"""One execution context: a profile, a stream, and memory for the tensors of one run."""

from typing import Any

import numpy as np

from serving.backends.tensorrt.cuda import Buffer
from serving.backends.tensorrt.engine import Engine
from serving.backends.tensorrt.profiles import Profile
from serving.tensors.tensor import Array
from sluice.errors import ErrorCode, SluiceError


class ExecutionContext:
    """One thread at a time, whichever."""

    def __init__(self, engine: Engine, profile: Profile, strategy: str) -> None:
        """On a thread. Raises SluiceError INTERNAL with TensorRT's reason."""
        self.profile = profile
        self._engine = engine
        self._device = engine.device
        self._device.use()
        self._stream: int | None = self._device.new_stream()
        self._context: Any = engine.new_context(strategy)
        try:
            self._context.set_optimization_profile_async(profile.index, self._stream)
        except RuntimeError as error:
            raise engine.failure(f"unable to set optimization profile {profile.index}") from error
        self._device.synchronize(self._stream)
        names = (*engine.signature.inputs, *engine.signature.outputs)
        self._buffers = {name: Buffer(self._device) for name in names}

    def run(self, inputs: dict[str, Array], outputs: list[str]) -> list[Array]:
        """The arrays of `outputs`. Blocks. Raises SluiceError INTERNAL with TensorRT's reason."""
        assert self._stream is not None
        self._device.use()
        # Held until the stream is through, which copies from them.
        given = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        for name, array in given.items():
            self._give(name, array, self._stream)
        # TensorRT computes every output, so each needs a place.
        places = {name: self._place(name) for name in self._engine.signature.outputs}
        if not self._context.execute_async_v3(self._stream):
            raise self._engine.failure("failed to execute the plan")
        arrays = [places[name] for name in outputs]
        for name, array in zip(outputs, arrays, strict=True):
            self._device.copy_out(array, self._buffers[name].address(array.nbytes), self._stream)
        self._device.synchronize(self._stream)
        return arrays

    def _give(self, name: str, array: Array, stream: int) -> None:
        if not self._context.set_input_shape(name, array.shape):
            raise self._engine.failure(f"failed to set the shape of input '{name}' to {list(array.shape)}")
        address = self._buffers[name].address(array.nbytes)
        self._device.copy_in(address, array, stream)
        self._context.set_tensor_address(name, address)

    def _place(self, name: str) -> Array:
        """Where an output goes: memory on the GPU, and an empty array that it is copied to."""
        shape = tuple(self._context.get_tensor_shape(name))
        if any(size < 0 for size in shape):
            reason = f"output '{name}' of model '{self._engine.model}' has a size that depends on the data"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, f"{reason}, which is not supported")
        array = np.empty(shape, self._engine.signature.outputs[name].data_type.dtype)
        self._context.set_tensor_address(name, self._buffers[name].address(array.nbytes))
        return array

    def close(self) -> None:
        """With no run under way. Idempotent."""
        for buffer in self._buffers.values():
            buffer.close()
        self._context = None
        if self._stream is not None:
            self._device.end_stream(self._stream)
            self._stream = None
