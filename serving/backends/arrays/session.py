"""What a library does for a backend of arrays: a model that is open, and runs of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import Lock

from serving.backends.arrays.heap import give_back_freed_memory
from serving.backends.arrays.signature import Signature
from serving.tensors.tensor import Array
from sluice.errors import ErrorCode, SluiceError

_holders_lock = Lock()


class ArrayRun(ABC):
    """One run of a session."""

    @abstractmethod
    def execute(self, inputs: dict[str, Array], outputs: list[str]) -> list[Array]:
        """The arrays of `outputs`, in that order. On a thread; blocks. May raise whatever the library raises.

        A run may be executed several times, one after the other. Arrays are the caller's: the library does not write
        to them again. BYTES are object arrays, of `str` where the session's `strings_are_text`, else of `bytes`.
        """

    @abstractmethod
    def stop(self) -> None:
        """End it early where the library can; `execute` then raises or returns. From any thread, idempotent."""

    @property
    @abstractmethod
    def is_stopped(self) -> bool: ...


class WholeRun(ArrayRun):
    """A run that its library cannot end early: one that is stopped does not begin."""

    def __init__(self, run: Callable[[dict[str, Array], list[str]], list[Array]]) -> None:
        self._run = run
        self._is_stopped = False

    def execute(self, inputs: dict[str, Array], outputs: list[str]) -> list[Array]:
        if self._is_stopped:
            raise SluiceError(ErrorCode.CANCELLED, "the request was cancelled")
        return self._run(inputs, outputs)

    def stop(self) -> None:
        self._is_stopped = True

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped


class ArraySession(ABC):
    """An open model. Threads may run it side by side; its weights are there once."""

    library: str
    """As errors call it: onnxruntime, OpenVINO …"""
    strings_are_text: bool = False
    """Whether the library's strings have to be UTF-8."""
    signature: Signature
    _num_holders = 0

    def hold(self) -> None:
        """Keep it open until `release`. From any thread."""
        with _holders_lock:
            self._num_holders += 1

    def release(self) -> None:
        """The end of one `hold`; the last one closes it. On a thread."""
        with _holders_lock:
            self._num_holders -= 1
            is_last = self._num_holders == 0
        if is_last:
            self.close()
            give_back_freed_memory()

    @abstractmethod
    def open_run(self) -> ArrayRun:
        """On the event loop; must not block."""

    @abstractmethod
    def failure_of(self, error: Exception) -> SluiceError:
        """What the library raised in a run: INVALID where it blames its inputs, else INTERNAL."""

    def close(self) -> None:  # noqa: B027 - a hook that some leave empty
        """Free the model once no run is left, without waiting for the garbage collector. On a thread; idempotent."""
