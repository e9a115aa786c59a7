"""Options of the command line that OpenVINO has no use for. TensorRT-LLM's process tells its own."""

from engine.config import EngineConfig, Runtime
from engine.runtimes import RUNTIMES

_PLAIN = EngineConfig(model_path="")

_FLAGS = {
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
    ignored = RUNTIMES[Runtime(runtime)].ignored_fields
    given = [
        flag for name, flag in _FLAGS.items() if name in ignored and getattr(engine, name) != getattr(_PLAIN, name)
    ]
    return [f"{flag}: {runtime} has no use for it" for flag in given]
