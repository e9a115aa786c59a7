"""OpenVINO as a runtime: what it takes, and when it is chosen."""

from collections.abc import Callable
from pathlib import Path

from sluice.engine.config import EngineConfig, Runtime, Task
from sluice.engine.model_folder import ModelFormat
from sluice.engine.runtime_spec import Appraisal, Fitness, RuntimeSpec, StepSizes
from sluice.errors import SluiceError

_DEFAULTS = EngineConfig(model_path="")


def _appraise(config: EngineConfig, num_gpus: int, is_installed: Callable[[], bool]) -> Appraisal:
    """It comes with the gateway and runs on every CPU."""
    return Appraisal(Fitness.FALLBACK)


def _find_problem(folder: Path) -> str:
    try:
        from sluice.engine.runners.openvino.source import identify_folder  # imports OpenVINO, which takes a while
    except ImportError as error:
        return f"OpenVINO cannot be imported: {error}"
    try:
        identify_folder(folder)
    except SluiceError as error:
        return error.message
    return ""


OPENVINO = RuntimeSpec(
    runtime=Runtime.OPENVINO,
    title="OpenVINO",
    devices="the CPU",
    device_names=("auto", "cpu"),
    process="sluice.engine.process",
    formats=frozenset({ModelFormat.HUGGINGFACE, ModelFormat.OPENVINO_IR}),
    tasks=frozenset({Task.GENERATE, Task.EMBED}),
    appraise=_appraise,
    default_step_sizes=StepSizes(_DEFAULTS.max_num_seqs, _DEFAULTS.max_num_batched_tokens),
    chooses_chunk=True,
    dtypes=("auto", "bf16", "f32"),
    kv_cache_dtypes=("auto", "bf16", "f32", "u8"),
    quantizations=("int8", "int4"),
    compresses_weights=True,
    distributions=("openvino",),
    find_problem=_find_problem,
    ignored_fields=frozenset(
        {
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "engine_python",
            "launcher",
            "runtime_settings",
            "llm_arguments",
        }
    ),
)
