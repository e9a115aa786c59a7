"""Parameters of config.pbtxt, in the names of Triton's backend, and the thread counts of the process."""

import logging
from dataclasses import dataclass
from threading import Lock

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError, invalid_argument

log = logging.getLogger(__name__)

_BOOLEANS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
_IGNORED = {
    "ENABLE_NVFUSER": "NVFuser is no longer part of PyTorch",
    "TORCH_COMPILE_OPTIONAL_PARAMETERS": "models are served as they were compiled",
}


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """Options of one model. None leaves the choice to PyTorch.

    `jit_profiling`, `jit_executor`, `tensor_fuser` and `has_cudnn` are switches of the whole process, set before every
    run. With `shares_weights` the instances on one device share a module, else each has its own.
    """

    is_optimized: bool = True
    uses_inference_mode: bool = True
    has_cudnn: bool = True
    cleans_cache: bool = False
    shares_weights: bool = False
    jit_profiling: bool | None = None
    jit_executor: bool | None = None
    tensor_fuser: bool | None = None
    intra_op_threads: int | None = None
    inter_op_threads: int | None = None


def parse_options(config: ModelConfig) -> TorchOptions:
    """Parse a model's parameters. Raises INVALID for invalid values."""
    given = {key: parameter.string_value for key, parameter in config.parameters.items()}
    return TorchOptions(
        is_optimized=not _parse_switch(given, "DISABLE_OPTIMIZED_EXECUTION", False),
        uses_inference_mode=_parse_switch(given, "INFERENCE_MODE", True),
        has_cudnn=not _parse_switch(given, "DISABLE_CUDNN", False),
        cleans_cache=_parse_switch(given, "ENABLE_CACHE_CLEANING", False),
        shares_weights=_parse_switch(given, "ENABLE_WEIGHT_SHARING", False),
        jit_profiling=_parse_choice(given, "ENABLE_JIT_PROFILING"),
        jit_executor=_parse_choice(given, "ENABLE_JIT_EXECUTOR"),
        tensor_fuser=_parse_choice(given, "ENABLE_TENSOR_FUSER"),
        intra_op_threads=_parse_count(given, "INTRA_OP_THREAD_COUNT", "NUM_THREADS"),
        inter_op_threads=_parse_count(given, "INTER_OP_THREAD_COUNT", "NUM_INTEROP_THREADS"),
    )


def ignored_parameters(config: ModelConfig) -> list[str]:
    """Return the given parameters that Triton's backend has, or had, and this one ignores, each with the reason."""
    return [f"{key} ({reason})" for key, reason in _IGNORED.items() if key in config.parameters]


def _parse_switch(given: dict[str, str], key: str, default: bool) -> bool:
    chosen = _parse_choice(given, key)
    return default if chosen is None else chosen


def _parse_choice(given: dict[str, str], key: str) -> bool | None:
    if key not in given:
        return None
    if given[key].lower() not in _BOOLEANS:
        raise _invalid(key, f"failed to convert '{given[key]}' to boolean")
    return _BOOLEANS[given[key].lower()]


def _parse_count(given: dict[str, str], *keys: str) -> int | None:
    """Return the first of these parameters that is given. 0 and less leave the choice to PyTorch."""
    for key in keys:
        if key in given:
            try:
                return max(int(given[key]), 0) or None
            except ValueError:
                raise _invalid(key, f"failed to convert '{given[key]}' to integral number") from None
    return None


def _invalid(key: str, reason: str) -> SluiceError:
    return invalid_argument(f"parameter '{key}': {reason}")


class ProcessThreads:
    """Thread counts of PyTorch, which belong to the process: the first model that sets them decides, as in Triton."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._intra_op: int | None = None
        self._inter_op: int | None = None

    def apply(self, model: str, intra_op: int | None, inter_op: int | None) -> None:
        """Set the counts that are not None, unless they were set before. Callable from any thread."""
        import torch

        with self._lock:
            if intra_op is not None and self._intra_op is None:
                torch.set_num_threads(intra_op)
                self._intra_op = intra_op
            if inter_op is not None and self._inter_op is None:
                self._inter_op = _set_inter_op(inter_op)
            self._warn_if_refused(model, intra_op, self._intra_op, "INTRA_OP_THREAD_COUNT")
            self._warn_if_refused(model, inter_op, self._inter_op, "INTER_OP_THREAD_COUNT")

    def _warn_if_refused(self, model: str, requested: int | None, given: int | None, key: str) -> None:
        if requested is not None and requested != given:
            log.warning(
                "model '%s': not obeyed: %s %d (the process has %s since it was first set)",
                model,
                key,
                requested,
                given,
            )


def _set_inter_op(count: int) -> int:
    """Set the count and return the one in force: once PyTorch has started these threads, their number stays."""
    import torch

    try:
        torch.set_num_interop_threads(count)
    except RuntimeError:
        return int(torch.get_num_interop_threads())
    return count
