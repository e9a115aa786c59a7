"""Options of `--backend-config=python,KEY=VALUE`, and a model's parameters."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError, invalid_argument

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
"""Default of Triton's `stub-timeout-seconds`."""
_FORCE_CPU = "FORCE_CPU_ONLY_INPUT_TENSORS"
_SHARED_MEMORY = "shared memory is anonymous, and grows and shrinks with the tensors"
_NO_EFFECT = {
    "shm-default-byte-size": _SHARED_MEMORY,
    "shm-growth-byte-size": _SHARED_MEMORY,
    "shm-region-prefix-name": _SHARED_MEMORY + ": it has no name that another server could take",
    "shm_message_queue_size": "messages travel over a socket, without a bound on their number",
    "thread-pool-size": "responses are passed on by the event loop, and wait for no thread",
}
"""Options that change nothing, each with what this backend does instead."""


@dataclass(frozen=True, slots=True)
class PythonOptions:
    """The server's options. `start_timeout_s` limits a process's start; `runtime` runs models without environment."""

    start_timeout_s: float = START_TIMEOUT_S
    runtime: Path | None = None


def parse_options(given: Mapping[str, str]) -> PythonOptions:
    """Parse the options. Raises INVALID for an invalid value. Logs options that have no effect."""
    for key in given:
        if key in _NO_EFFECT:
            log.info("--backend-config=python,%s changes nothing: %s", key, _NO_EFFECT[key])
        elif key not in ("stub-timeout-seconds", "python-runtime"):
            log.warning("--backend-config=python,%s is not known and has no effect", key)
    runtime = given.get("python-runtime")
    return PythonOptions(_parse_timeout(given.get("stub-timeout-seconds")), Path(runtime) if runtime else None)


def _parse_timeout(text: str | None) -> float:
    if text is None:
        return START_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise invalid_argument(
            f"--backend-config=python,stub-timeout-seconds takes a number of seconds above 0, not '{text}'"
        )
    return seconds


def check_parameters(config: ModelConfig) -> None:
    """Check `FORCE_CPU_ONLY_INPUT_TENSORS`, which changes nothing here. Raises UNIMPLEMENTED in Triton's words."""
    value = config.parameters[_FORCE_CPU].string_value if _FORCE_CPU in config.parameters else "yes"
    if value not in ("yes", "no"):
        raise SluiceError(ErrorCode.UNIMPLEMENTED, f"Incorrect value for {_FORCE_CPU}: '{value}'")
