"""TensorRT-LLM as a runtime: what it takes, and when it is chosen. The library itself is not imported."""

from collections.abc import Callable
from pathlib import Path

from sluice.engine.config import EngineConfig, Runtime, Task
from sluice.engine.delegated.tensorrt_llm.configuration.catalogue import SETTINGS
from sluice.engine.delegated.tensorrt_llm.folder import read_folder
from sluice.engine.model_folder import ModelFormat
from sluice.engine.runtime_spec import Appraisal, Fitness, RuntimeInstall, RuntimeSpec, StepSizes
from sluice.engine.sampling_fields import OPTIONAL_FIELDS
from sluice.errors import SluiceError


def _appraise(config: EngineConfig, num_gpus: int, is_installed: Callable[[], bool]) -> Appraisal:
    fitness = Fitness.NEEDED if is_installed() else Fitness.MISSING
    if config.tensor_parallel_size * config.pipeline_parallel_size > 1:
        return Appraisal(fitness, "the model is to be spread over several GPUs")
    if not num_gpus:
        return Appraisal(Fitness.DECLINED, "there is no NVIDIA GPU")
    if not is_installed():
        return Appraisal(Fitness.DECLINED, f"there are {num_gpus} GPUs, but TensorRT-LLM is not installed")
    return Appraisal(Fitness.FASTER, f"TensorRT-LLM is installed and there are {num_gpus} GPUs")


def _compiled_step_sizes(config: EngineConfig) -> StepSizes | None:
    """Return the sizes of a compiled engine. Loading one reports what is wrong with it."""
    try:
        build = read_folder(Path(config.model_path)).build_config or {}
    except SluiceError:
        return None
    seqs, tokens = build.get("max_batch_size"), build.get("max_num_tokens")
    if isinstance(seqs, int) and isinstance(tokens, int) and 0 < seqs <= tokens:
        return StepSizes(seqs, tokens)
    return None


_BY_HAND = """\
TensorRT-LLM 1.2 to 1.4 needs a Linux machine with an NVIDIA GPU of compute capability 8.0 or newer, a driver for CUDA
13, Python 3.10 or 3.12, OpenMPI (libopenmpi-dev) and about 15 GB. Its wheels lie at NVIDIA:

  python3.12 -m venv /opt/trtllm
  /opt/trtllm/bin/pip install --extra-index-url https://pypi.nvidia.com 'tensorrt-llm>=1.2,<1.5'
  /opt/trtllm/bin/pip install --no-deps sluice && /opt/trtllm/bin/pip install msgspec pyzmq packaging

Then: sluice serve MODEL --runtime tensorrt_llm --engine-python /opt/trtllm/bin/python
NVIDIA's container nvcr.io/nvidia/tensorrt-llm/release has all but the last line. docs/tensorrt-llm.md says more.
"""


TENSORRT_LLM = RuntimeSpec(
    runtime=Runtime.TENSORRT_LLM,
    title="TensorRT-LLM",
    devices="NVIDIA GPUs",
    process="sluice.engine.delegated.tensorrt_llm.process",
    formats=frozenset({ModelFormat.HUGGINGFACE, ModelFormat.TENSORRT_LLM_CHECKPOINT, ModelFormat.TENSORRT_LLM_ENGINE}),
    tasks_on_request=frozenset({Task.EMBED, Task.SCORE}),
    appraise=_appraise,
    # A GPU reads its weights for many requests at the cost of one.
    default_step_sizes=StepSizes(256, 8192),
    built_in_step_sizes=_compiled_step_sizes,
    dtypes=("auto", "bf16", "f32", "float16"),
    kv_cache_dtypes=("auto", "fp8", "nvfp4"),
    quantizations=(
        "int8",
        "int4",
        # the names of QuantAlgo
        "fp8",
        "fp8_block_scales",
        "nvfp4",
        "w8a16",
        "w4a16",
        "w4a16_awq",
        "w4a8_awq",
        "w4a16_gptq",
        "w8a8_sq_per_channel",
    ),
    compresses_weights=False,
    distributions=("tensorrt-llm", "tensorrt", "torch"),
    # Ampere, the oldest architecture in TensorRT-LLM's list of supported hardware.
    min_capability=(8, 0),
    library="tensorrt_llm",
    remedy=(
        "install it on a machine with an NVIDIA GPU, into an environment of its own, and name that one's Python "
        "(--engine-python)"
    ),
    install=RuntimeInstall(by_hand=_BY_HAND),
    settings=SETTINGS,
    sampling_fields=OPTIONAL_FIELDS,
    kv_tier_advice="--runtime-setting kv_cache_config.host_cache_size=SIZE gives it host memory",
    hands_over=True,
    ignored_fields=frozenset({"cache_path", "num_threads"}),
)
