"""Options of the command line that OpenVINO has no use for. TensorRT-LLM's process tells its own."""

from engine.config import EngineConfig, Runtime

_PLAIN = EngineConfig(model_path="")

_ONLY_TENSORRT_LLM = {
    "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "lora_modules": "--lora-modules",
    "engine_python": "--engine-python",
    "launcher": "--engine-launcher",
    "runtime_settings": "--runtime-setting",
    "llm_arguments": "--extra-llm-api-options",
}
"""By field of EngineConfig."""


def unused_options(engine: EngineConfig, runtime: str) -> list[str]:
    """Notes on those that were given and do nothing on `runtime`."""
    if runtime == Runtime.TENSORRT_LLM:
        return []
    given = [flag for name, flag in _ONLY_TENSORRT_LLM.items() if getattr(engine, name) != getattr(_PLAIN, name)]
    return [f"{flag}: {runtime} has no use for it" for flag in given]
