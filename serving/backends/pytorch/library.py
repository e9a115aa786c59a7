"""PyTorch itself, which is an extra: how it is found, where it runs, how many threads it takes."""

import logging
from threading import Lock

from sluice.errors import ErrorCode, SluiceError

_log = logging.getLogger(__name__)


def require_torch(model: str) -> None:
    """Import torch: takes seconds, for a thread. Raises SluiceError UNAVAILABLE where it is not there or broken."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        how = "install it with: pip install 'sluice[pytorch]'"
        reason = f"backend 'pytorch' needs PyTorch, which cannot be imported ({error}); {how}"
        raise SluiceError(ErrorCode.UNAVAILABLE, f"unable to load model '{model}', {reason}") from None


def num_usable_gpus() -> int:
    """GPUs that the installed torch can run on."""
    import torch

    return int(torch.cuda.device_count())


class ThreadCounts:
    """PyTorch has them once for the process: the first model that asks gets them, as in Triton."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._intra_op: int | None = None
        self._inter_op: int | None = None

    def apply(self, model: str, intra_op: int | None, inter_op: int | None) -> None:
        """From any thread. None asks for nothing."""
        import torch

        with self._lock:
            if intra_op is not None and self._intra_op is None:
                torch.set_num_threads(intra_op)
                self._intra_op = intra_op
            if inter_op is not None and self._inter_op is None:
                self._inter_op = _set_inter_op(inter_op)
            self._say_what_was_refused(model, intra_op, self._intra_op, "INTRA_OP_THREAD_COUNT")
            self._say_what_was_refused(model, inter_op, self._inter_op, "INTER_OP_THREAD_COUNT")

    def _say_what_was_refused(self, model: str, asked: int | None, given: int | None, key: str) -> None:
        if asked is not None and asked != given:
            _log.warning(
                "model '%s': not obeyed: %s %d (the process has %s since it was first set)", model, key, asked, given
            )


def _set_inter_op(count: int) -> int:
    """What holds then: once PyTorch has started these threads, their number stays."""
    import torch

    try:
        torch.set_num_interop_threads(count)
    except RuntimeError:
        return int(torch.get_num_interop_threads())
    return count
