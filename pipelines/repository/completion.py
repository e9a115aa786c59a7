"""What Triton fills into a configuration before and after the backend has seen the model's file.

`complete_kind` runs once a model: name, backend, platform and file name, from each other and from what lies in the
version folders. `normalize` runs before and after `Backend.complete`, and changes nothing the second time.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from engine.runtimes import num_gpus
from pipelines.repository.findings import refusal

ENSEMBLE = "ensemble"
DEFAULT_IDLE_US = 1_000_000
"""How long a sequence may be idle where the configuration does not say: Triton's second."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What tells one backend's models: any of these words or files."""

    backend: str
    filename: str
    platform: str = ""


KINDS = (
    Kind("onnxruntime", "model.onnx", "onnxruntime_onnx"),
    Kind("tensorrt", "model.plan", "tensorrt_plan"),
    Kind("pytorch", "model.pt", "pytorch_libtorch"),
    Kind("pytorch", "model.pt2", "torch_aoti"),
    Kind("tensorflow", "model.savedmodel", "tensorflow_savedmodel"),
    Kind("tensorflow", "model.graphdef", "tensorflow_graphdef"),
    Kind("openvino", "model.xml"),
    Kind("python", "model.py"),
)
_PERHAPS = 0.4
"""How alike a platform must be to the one that was meant: all are known, and few."""
LLM_BACKENDS = frozenset({"llm", "tensorrtllm", "vllm"})
_CHECKPOINT_PATTERNS = ("*.engine", "*.safetensors", "pytorch_model*.bin", "openvino_model.xml")
_CHECKPOINT_CONFIG = "config.json"
_LLM_ARGUMENTS = "model.yaml"
"""Of NVIDIA's models for TensorRT-LLM's LLM class."""


def complete_kind(config: ModelConfig, name: str, version_folders: Sequence[Path]) -> None:
    """Fill in name, backend, platform and default file name. Reads folders: for a thread.

    Raises InvalidConfig where the name is not the folder's, or what it is cannot be told.
    """
    config.name = config.name or name
    if config.name != name:
        raise refusal(
            f"unexpected directory name '{name}' for model '{config.name}', directory name must equal model name",
            "name",
            f'name: "{name}", or no name at all',
        )
    if _is_ensemble(config):
        return
    if not config.backend and config.platform:
        config.backend = _backend_of_platform(config)
    if not config.backend:
        config.backend = _backend_of_files(name, version_folders)
    kind = _kind(config, version_folders)
    if kind is not None:
        config.platform = config.platform or kind.platform
        config.default_model_filename = config.default_model_filename or kind.filename


def normalize(config: ModelConfig) -> None:
    """Fill in what has a default, as Triton does, in place."""
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    _drop_repeated(config)
    _fill_preferred(config)
    if config.HasField("sequence_batching") and not config.sequence_batching.max_sequence_idle_microseconds:
        config.sequence_batching.max_sequence_idle_microseconds = DEFAULT_IDLE_US
    if config.platform == ENSEMBLE:
        return
    for pinned in ("input_pinned_memory", "output_pinned_memory"):
        if not config.optimization.HasField(pinned):
            getattr(config.optimization, pinned).enable = True
    _fill_instance_groups(config)


def _drop_repeated(config: ModelConfig) -> None:
    """Tensors that are declared a second time in the same words, as in NVIDIA's ensemble for TensorRT-LLM."""
    for tensors in (config.input, config.output):
        for index in reversed(range(len(tensors))):
            if any(each == tensors[index] for each in tensors[:index]):
                del tensors[index]


def _fill_preferred(config: ModelConfig) -> None:
    """A batcher without preferred sizes prefers the largest."""
    batchers = []
    if config.HasField("dynamic_batching"):
        batchers.append(config.dynamic_batching)
    if config.sequence_batching.HasField("oldest"):
        batchers.append(config.sequence_batching.oldest)
    for batcher in batchers:
        if not batcher.preferred_batch_size and config.max_batch_size > 0:
            batcher.preferred_batch_size.append(config.max_batch_size)


def _fill_instance_groups(config: ModelConfig) -> None:
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        if group.kind == ModelInstanceGroup.KIND_AUTO and not has_gpu():
            group.kind = ModelInstanceGroup.KIND_CPU
        if group.count < 1:
            group.count = 1


def has_gpu() -> bool:
    """Whether the machine has an NVIDIA GPU; which backends can use it is theirs to say."""
    return num_gpus() > 0


def _is_ensemble(config: ModelConfig) -> bool:
    return bool(config.platform == ENSEMBLE or config.HasField("ensemble_scheduling"))


def _backend_of_platform(config: ModelConfig) -> str:
    for kind in KINDS:
        if config.platform == kind.platform:
            return kind.backend
    known = [kind.platform for kind in KINDS if kind.platform]
    near = difflib.get_close_matches(config.platform, known, n=1, cutoff=_PERHAPS)
    message = f"unexpected platform type '{config.platform}' for {config.name}"
    raise refusal(message, "platform", f'platform: "{near[0]}"' if near else "backend in place of platform")


def _backend_of_files(name: str, version_folders: Sequence[Path]) -> str:
    for kind in KINDS:
        if any((folder / kind.filename).exists() for folder in version_folders):
            return kind.backend
    if any(_is_checkpoint(folder) for folder in version_folders):
        return "llm"
    for folder in version_folders:
        custom = sorted(each.suffix[1:] for each in folder.glob("model.?*"))
        if custom:
            return custom[0]
    filenames = ", ".join(kind.filename for kind in KINDS)
    raise refusal(
        f"Invalid model name: Could not determine backend for model '{name}' with no backend in model configuration. "
        "Expected model name of the form 'model.<backend_name>'.",
        remedy=f"backend in config.pbtxt, or have one of {filenames} in the version's folder",
    )


def _is_checkpoint(folder: Path) -> bool:
    """Whether it holds a language model, or says where: checkpoint, OpenVINO export, compiled engines, arguments."""
    if any(folder.glob("*.engine")) or (folder / _LLM_ARGUMENTS).is_file():
        return True
    return (folder / _CHECKPOINT_CONFIG).is_file() and any(any(folder.glob(each)) for each in _CHECKPOINT_PATTERNS)


def _kind(config: ModelConfig, version_folders: Sequence[Path]) -> Kind | None:
    """The kind that backend and platform name; where that leaves several, the one whose file is there."""
    fitting = [kind for kind in KINDS if kind.backend == config.backend and config.platform in ("", kind.platform)]
    for kind in fitting:
        if any((folder / kind.filename).exists() for folder in version_folders):
            return kind
    return fitting[0] if fitting else None
