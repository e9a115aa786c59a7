"""torch as a runtime: what it takes, and when it is chosen. The library itself is not imported."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sluice.engine.config import EngineConfig, Runtime, Task
from sluice.engine.model_folder import ModelFormat
from sluice.engine.runtime_settings import RuntimeSetting, SettingsTable, boolean
from sluice.engine.runtime_spec import Appraisal, Fitness, RuntimeInstall, RuntimeSpec, StepSizes
from sluice.errors import SluiceError
from sluice.machine import num_gpus

_ON_CPU = StepSizes(64, 512)
"""A step of a CPU takes as long as it has tokens."""
_DISTRIBUTIONS = ("torch>=2.11,<3", "numpy>=2.4,<3", "safetensors>=0.8,<1", "llguidance>=1.9,<2")
"""The library, and what our executor needs beside what every engine's process does."""
SETTINGS = SettingsTable(
    "torch",
    {
        "Steps": (
            RuntimeSetting(
                "graphs",
                "",
                boolean,
                "run decode steps from fixed buffers, padded to a few batch sizes: on a GPU from CUDA graphs, which "
                "launch faster, on the CPU only to test that. Default: true on a GPU",
                aliases=("cuda_graphs",),
            ),
            RuntimeSetting(
                "grouped_experts",
                "",
                boolean,
                "multiply the rows of all experts in one product, or false: in one for each expert, which CUDA graphs "
                "cannot hold. Default: true on a GPU of compute capability 9 or 10, in bf16",
            ),
            RuntimeSetting(
                "lookahead",
                "",
                boolean,
                "launch each step before the tokens of the last one are known, so that no GPU waits for the host. "
                "Steps wait for each other while a request follows a grammar, has penalties or asks for log "
                "probabilities, and with speculation or several GPUs. On the CPU only to test that. Default: true on a "
                "GPU",
                aliases=("async_scheduling",),
            ),
        )
    },
    "docs/gpus.md",
)


def _appraise(config: EngineConfig, num_found: int, is_installed: Callable[[], bool]) -> Appraisal:
    """It is chosen by itself only on a GPU, and only where neither TensorRT-LLM nor vLLM is installed."""
    if not num_found:
        return Appraisal(Fitness.DECLINED, "there is no NVIDIA GPU")
    if config.device == "cpu":
        return Appraisal(Fitness.DECLINED, "the CPU is asked for")
    if config.pipeline_parallel_size > 1:
        return Appraisal(Fitness.DECLINED, "layers are to be divided among GPUs, and torch's runner divides each layer")
    if (size := config.tensor_parallel_size) > num_found:
        return Appraisal(Fitness.DECLINED, f"{size} GPUs are to share each layer, and there are {num_found}")
    if not is_installed():
        return Appraisal(Fitness.DECLINED, f"there are {num_found} GPUs, but torch is not installed")
    if config.engine_python is None and _is_built_for_cpus():
        return Appraisal(Fitness.DECLINED, f"there are {num_found} GPUs, but torch is built without CUDA")
    if size > 1:
        return Appraisal(Fitness.NEEDED, "several GPUs are to share each layer, and torch is installed")
    return Appraisal(Fitness.FASTER, f"torch is installed and there are {num_found} GPUs")


def _is_built_for_cpus() -> bool:
    """Whether the torch of this Python is a build without CUDA, by its version: importing it takes seconds."""
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:  # it is in an environment of its own, which was made for this machine
        return False


def _find_problem(folder: Path) -> str:
    from sluice.engine.models.architectures import read_decoder_config  # reads families, which takes a while

    try:
        read_decoder_config(folder, takes_fp8=True)
    except SluiceError as error:
        return error.message
    return ""


TORCH = RuntimeSpec(
    runtime=Runtime.TORCH,
    title="torch",
    devices="NVIDIA GPUs and the CPU",
    device_names=("auto", "cpu", "cuda"),
    process="sluice.engine.runners.torch.process",
    formats=frozenset({ModelFormat.HUGGINGFACE}),
    tasks=frozenset({Task.GENERATE, Task.EMBED}),
    appraise=_appraise,
    default_step_sizes=StepSizes(256, 2048),
    built_in_step_sizes=lambda config: None if num_gpus() and config.device != "cpu" else _ON_CPU,
    chooses_chunk=True,
    dtypes=("auto", "bf16", "f32", "float16"),
    kv_cache_dtypes=("auto", "bf16", "f32", "float16"),
    quantizations=("fp8",),
    compresses_weights=True,
    distributions=("torch", "triton"),
    library="torch",
    remedy="pip install 'sluice[torch]'",
    install=RuntimeInstall(on_gpu=_DISTRIBUTIONS, on_cpu=_DISTRIBUTIONS, size_gb=0.9),
    settings=SETTINGS,
    find_problem=_find_problem,
    ignored_fields=frozenset({"cache_path", "llm_arguments"}),
)
