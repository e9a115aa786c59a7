"""Which runtime serves a model folder, and why."""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from engine.config import EngineConfig, Runtime
from engine.model_folder import ModelFormat, model_format
from sluice.errors import ErrorCode, SluiceError
from sluice.machine import num_gpus

ANSWER_S = 20.0
"""How long another Python may take to start."""
PROCESS_NEEDS = ("engine", "sluice", "msgspec", "zmq", "packaging")
"""Modules that the engine's process imports beside TensorRT-LLM and what that brings."""
REMEDY = (
    "install it on a machine with an NVIDIA GPU, into an environment of its own, and name that one's Python "
    "(--engine-python)"
)

PROCESSES = {Runtime.OPENVINO: "engine.process", Runtime.TENSORRT_LLM: "engine.delegated.tensorrt_llm.process"}
"""The module that is the engine's process, by runtime."""


_RUN_BY_TENSORRT_LLM = frozenset({ModelFormat.TENSORRT_LLM_CHECKPOINT, ModelFormat.TENSORRT_LLM_ENGINE})


@dataclass(frozen=True, slots=True)
class RuntimeChoice:
    """A runtime, and why it is this one: for the log."""

    runtime: Runtime
    reason: str


def has_tensorrt_llm(python: str | None = None) -> bool:
    """Whether the library is installed, for `python` where that is another one. It is not imported: that takes many
    seconds. Raises SluiceError UNAVAILABLE where there is no such Python."""
    return find_spec("tensorrt_llm") is not None if python is None else _has_library(python)


def _has_library(python: str) -> bool:
    return _lacks(python, ("tensorrt_llm",)) == ()


@cache
def _lacks(python: str, modules: tuple[str, ...]) -> tuple[str, ...] | None:
    """Those of `modules` that it does not find; None where it does not say."""
    question = "import sys, importlib.util as util; print('lacks', *(m for m in sys.argv[1:] if not util.find_spec(m)))"
    try:
        answer = subprocess.run((python, "-c", question, *modules), timeout=ANSWER_S, check=False, capture_output=True)
        said = answer.stdout.decode(errors="replace").split()
        return tuple(said[1:]) if answer.returncode == 0 and said[:1] == ["lacks"] else None
    except (OSError, subprocess.SubprocessError) as error:
        message = f"engine_python must be a Python that can be run, got {python!r}: {error}"
        raise SluiceError(ErrorCode.UNAVAILABLE, message, param="engine_python") from None


def check_process(python: str | None) -> None:
    """Raises SluiceError UNAVAILABLE where `python`, which has TensorRT-LLM, lacks what the engine's process needs."""
    lacking = () if python is None else _lacks(python, PROCESS_NEEDS)
    if lacking:
        raise SluiceError(
            ErrorCode.UNAVAILABLE,
            f"{python} has TensorRT-LLM, but not {', '.join(lacking)}; in its environment: "
            "pip install --no-deps sluice && pip install msgspec pyzmq packaging",
            param="engine_python",
        )


def choose_runtime(
    config: EngineConfig,
    *,
    count_gpus: Callable[[], int] = num_gpus,
    is_installed: Callable[[str | None], bool] = has_tensorrt_llm,
) -> RuntimeChoice:
    """The runtime that `config` asks for, else the one made for its model on this machine.

    Raises SluiceError UNAVAILABLE for a model or a runtime that needs TensorRT-LLM where that is not installed.
    """
    found = model_format(Path(config.model_path))
    wanted = config.runtime
    if wanted is Runtime.AUTO:
        wanted, reason = _made_for(found, config, count_gpus, is_installed)
    else:
        reason = "it was asked for"
    if wanted is Runtime.TENSORRT_LLM and not is_installed(config.engine_python):
        what = "it was asked for" if config.runtime is wanted else reason
        raise SluiceError(
            ErrorCode.UNAVAILABLE,
            f"TensorRT-LLM would run {config.model_path} ({what}), but it is not installed for "
            f"{config.engine_python or 'this Python'}; {REMEDY}, or serve the HuggingFace checkpoint with "
            "--runtime openvino. `sluice doctor` says what this machine has",
        )
    if wanted is Runtime.OPENVINO and found in _RUN_BY_TENSORRT_LLM:
        raise SluiceError(
            ErrorCode.INVALID,
            f"{config.model_path} is a {found.value.replace('_', ' ')}, which OpenVINO cannot run; serve the "
            "HuggingFace checkpoint that it was made of, or use --runtime tensorrt_llm",
        )
    return RuntimeChoice(wanted, reason)


def _made_for(
    found: ModelFormat | None,
    config: EngineConfig,
    count_gpus: Callable[[], int],
    is_installed: Callable[[str | None], bool],
) -> tuple[Runtime, str]:
    if found in _RUN_BY_TENSORRT_LLM:
        return Runtime.TENSORRT_LLM, f"the folder holds a {found.value.replace('_', ' ')}"
    if found is ModelFormat.OPENVINO_IR:
        return Runtime.OPENVINO, "the folder holds an OpenVINO IR"
    if config.tensor_parallel_size * config.pipeline_parallel_size > 1:
        return Runtime.TENSORRT_LLM, "the model is to be spread over several GPUs"
    if config.lora_modules:
        return Runtime.TENSORRT_LLM, "LoRA adapters are given"
    gpus = count_gpus()
    if gpus and is_installed(config.engine_python):
        return Runtime.TENSORRT_LLM, f"TensorRT-LLM is installed and there are {gpus} GPUs"
    if gpus:
        return Runtime.OPENVINO, f"there are {gpus} GPUs, but TensorRT-LLM is not installed"
    return Runtime.OPENVINO, "there is no NVIDIA GPU"
