"""`--backend-config=python,KEY=VALUE`: which of the real server's options mean something here."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
"""As the real server's."""
_FORCE_CPU = "FORCE_CPU_ONLY_INPUT_TENSORS"
_SHARED_MEMORY = "shared memory is anonymous, and grows and shrinks with the tensors"
_ELSEWISE = {
    "shm-default-byte-size": _SHARED_MEMORY,
    "shm-growth-byte-size": _SHARED_MEMORY,
    "shm-region-prefix-name": _SHARED_MEMORY + ": it has no name that another server could take",
    "shm_message_queue_size": "messages travel over a socket, without a bound on their number",
    "thread-pool-size": "responses are passed on by the event loop, and wait for no thread",
}
"""What stands in place of what an option would change."""


@dataclass(frozen=True, slots=True)
class PythonOptions:
    """`start_timeout_s`: for a worker process to come up, before it loads its model. `runtime`: another interpreter."""

    start_timeout_s: float = START_TIMEOUT_S
    runtime: Path | None = None


def parse_options(given: Mapping[str, str]) -> PythonOptions:
    """Raises SluiceError INVALID for a value that is none. Options without an effect are said in the log."""
    for key in given:
        if key in _ELSEWISE:
            log.info("--backend-config=python,%s changes nothing: %s", key, _ELSEWISE[key])
        elif key not in ("stub-timeout-seconds", "python-runtime"):
            log.warning("--backend-config=python,%s is not known and has no effect", key)
    runtime = given.get("python-runtime")
    return PythonOptions(_seconds(given.get("stub-timeout-seconds")), Path(runtime) if runtime else None)


def _seconds(text: str | None) -> float:
    if text is None:
        return START_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise SluiceError(
            ErrorCode.INVALID,
            f"--backend-config=python,stub-timeout-seconds takes a number of seconds above 0, not '{text}'",
        )
    return seconds


def check_parameters(config: ModelConfig) -> None:
    """Tensors lie in the CPU's memory whatever a model says of that, but it must say something that there is.

    Raises SluiceError UNIMPLEMENTED in Triton's words.
    """
    value = config.parameters[_FORCE_CPU].string_value if _FORCE_CPU in config.parameters else "yes"
    if value not in ("yes", "no"):
        raise SluiceError(ErrorCode.UNIMPLEMENTED, f"Incorrect value for {_FORCE_CPU}: '{value}'")
