"""Interface between the array backends and their libraries: a model's signature, its session and its runs."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from sluice.errors import ErrorCode, SluiceError
from sluice.heap import trim_heap
from sluice.serving.loop_turn import StoppableRun
from sluice.serving.tensors.datatypes import DataType
from sluice.serving.tensors.tensor import Array

_references_lock = Lock()


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """Type and dims of one tensor.

    `dims` include the batch dimension where the model has one; -1 is any size. Empty dims stand for a scalar or any
    shape.
    """

    name: str
    data_type: DataType
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """Tensors by name, in the model's order. `optional_inputs` have a default that a request may replace."""

    inputs: dict[str, TensorSignature]
    optional_inputs: dict[str, TensorSignature]
    outputs: dict[str, TensorSignature]

    @property
    def can_batch(self) -> bool:
        """Whether the first dimension of every tensor is open."""
        return all(tensor.dims[:1] == (-1,) for tensor in (*self.inputs.values(), *self.outputs.values()))


class ArrayRun(StoppableRun):
    """One run of a session."""

    can_stop: bool = False
    """Whether `stop` ends a run that has begun."""

    @abstractmethod
    def execute(self, inputs: dict[str, Array], outputs: list[str]) -> list[Array]:
        """Return the arrays of `outputs`, in that order.

        Called on a thread; blocks. May raise any exception of the library. A run may be executed several times, one
        after the other. The caller owns the arrays: the library does not write to them again. BYTES are object arrays,
        of `str` where the session's `strings_are_text`, else of `bytes`.
        """


class UninterruptibleRun(ArrayRun):
    """Run that its library cannot end early. A stopped one does not begin."""

    def __init__(self, run: Callable[[dict[str, Array], list[str]], list[Array]]) -> None:
        self._run = run

    def execute(self, inputs: dict[str, Array], outputs: list[str]) -> list[Array]:
        if self.is_stopped:
            raise SluiceError(ErrorCode.CANCELLED, "the request was cancelled")
        return self._run(inputs, outputs)

    def stop(self) -> None:
        self.is_stopped = True


class ArraySession(ABC):
    """An open model. Several threads may run it at the same time; its weights are in memory once."""

    library: str
    """Name of the library in errors: onnxruntime, OpenVINO …"""
    strings_are_text: bool = False
    """Whether the library requires strings to be UTF-8."""
    signature: Signature
    _num_references = 0

    def hold(self) -> None:
        """Keep the session open until `release`. Callable from any thread."""
        with _references_lock:
            self._num_references += 1

    def release(self) -> None:
        """End one `hold`; the last one closes the session. Blocks: call it on a thread."""
        with _references_lock:
            self._num_references -= 1
            is_last = self._num_references == 0
        if is_last:
            self.close()
            trim_heap()

    @abstractmethod
    def open_run(self) -> ArrayRun:
        """Return a new run. Called on the event loop; must not block."""

    @abstractmethod
    def convert_error(self, error: Exception) -> SluiceError:
        """Convert what the library raised in a run: to INVALID where it blames the inputs, else to INTERNAL."""

    def close(self) -> None:  # noqa: B027 - a hook that some leave empty
        """Free the model at once, when no run is left. Blocks: call it on a thread. Idempotent."""
