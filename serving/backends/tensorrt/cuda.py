"""Memory and streams of one GPU, through CUDA's runtime API."""

import weakref
from typing import Any

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.tensors.tensor import Array


class CudaDevice:
    """One GPU. A thread calls `use` before all else, also of TensorRT: CUDA's current device is the thread's."""

    def __init__(self, cuda: Any, index: int) -> None:
        """`cuda` is the module `cuda.bindings.runtime`."""
        self._cuda = cuda
        self._index = index

    def use(self) -> None:
        self._call("cudaSetDevice", self._index)

    def allocate(self, size_bytes: int) -> int:
        return int(self._call("cudaMalloc", size_bytes))

    def free(self, address: int) -> None:
        self.use()
        self._call("cudaFree", address)

    def create_stream(self) -> int:
        return int(self._call("cudaStreamCreate"))

    def destroy_stream(self, stream: int) -> None:
        self.use()
        self._call("cudaStreamDestroy", stream)

    def copy_in(self, address: int, array: Array, stream: int) -> None:
        """Queue a copy of `array`, which is contiguous and must stay until the stream has been synchronized."""
        self._copy(address, array.ctypes.data, array.nbytes, "cudaMemcpyHostToDevice", stream)

    def copy_out(self, array: Array, address: int, stream: int) -> None:
        """Queue a copy to `array`, which is contiguous and must stay until the stream has been synchronized."""
        self._copy(array.ctypes.data, address, array.nbytes, "cudaMemcpyDeviceToHost", stream)

    def synchronize(self, stream: int) -> None:
        """Wait until the stream has done everything that was queued."""
        self._call("cudaStreamSynchronize", stream)

    def _copy(self, to: int, source: int, size_bytes: int, kind: str, stream: int) -> None:
        if size_bytes:
            self._call("cudaMemcpyAsync", to, source, size_bytes, getattr(self._cuda.cudaMemcpyKind, kind), stream)

    def _call(self, function: str, *arguments: Any) -> Any:
        """Call a function of CUDA and return what it gives beside its status. Raises INTERNAL."""
        status, *given = getattr(self._cuda, function)(*arguments)
        if status != self._cuda.cudaError_t.cudaSuccess:
            _, text = self._cuda.cudaGetErrorString(status)
            reason = f"{function} on GPU {self._index} failed: {text.decode() if isinstance(text, bytes) else text}"
            raise SluiceError(ErrorCode.INTERNAL, reason)
        return given[0] if given else None


class CudaBuffer:
    """Memory of a GPU that grows to the largest size it was asked for."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._size_bytes = 0
        self._free: weakref.finalize[..., Any] | None = None
        self._address = 0

    def address(self, size_bytes: int) -> int:
        """Return an address with at least so many bytes. Growing discards the contents."""
        if self._free is None or size_bytes > self._size_bytes:
            self.close()
            # TensorRT needs an address for empty tensors too.
            self._size_bytes = max(size_bytes, 1)
            self._address = self._device.allocate(self._size_bytes)
            self._free = weakref.finalize(self, self._device.free, self._address)
        return self._address

    def close(self) -> None:
        """Free the memory. Idempotent; garbage collection does the same."""
        if self._free is not None:
            self._free()
            self._free = None
