"""What Triton fills into a configuration before and after the backend has seen the model's file.

`complete_kind` runs once a model: name, backend, platform and file name, from each other and from what lies in the
version folders. `normalize` runs before and after `Backend.complete`, and changes nothing the second time.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from serving.backend import ModelFile
from serving.backends.registry import BackendRegistry
from serving.findings import refusal
from sluice.machine import num_gpus

ENSEMBLE = "ensemble"
DEFAULT_IDLE_US = 1_000_000
"""How long a sequence may be idle where the configuration does not say: Triton's second."""


_PERHAPS = 0.4
"""How alike a platform must be to the one that was meant: all are known, and few."""


def complete_kind(config: ModelConfig, name: str, version_folders: Sequence[Path], backends: BackendRegistry) -> None:
    """Fill in name, backend, platform and default file name. Reads folders and imports backends: for a thread.

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
        config.backend = _backend_of_platform(config, backends)
    if not config.backend:
        config.backend = _backend_of_files(name, version_folders, backends)
    file = _model_file(config, version_folders, backends)
    if file is not None:
        config.platform = config.platform or file.platform
        config.default_model_filename = config.default_model_filename or file.name


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


def _backend_of_platform(config: ModelConfig, backends: BackendRegistry) -> str:
    platforms = {
        file.platform: backend.name
        for backend in backends.in_detection_order()
        for file in backend.model_files
        if file.platform
    }
    if config.platform in platforms:
        return platforms[config.platform]
    near = difflib.get_close_matches(config.platform, platforms, n=1, cutoff=_PERHAPS)
    message = f"unexpected platform type '{config.platform}' for {config.name}"
    raise refusal(message, "platform", f'platform: "{near[0]}"' if near else "backend in place of platform")


def _backend_of_files(name: str, version_folders: Sequence[Path], backends: BackendRegistry) -> str:
    installed = backends.in_detection_order()
    for backend in installed:
        if any(backend.recognizes(folder) for folder in version_folders):
            return backend.name
    for folder in version_folders:
        custom = sorted(each.suffix[1:] for each in folder.glob("model.?*"))
        if custom:
            return custom[0]
    filenames = ", ".join(file.name for backend in installed for file in backend.model_files)
    raise refusal(
        f"Invalid model name: Could not determine backend for model '{name}' with no backend in model configuration. "
        "Expected model name of the form 'model.<backend_name>'.",
        remedy=f"backend in config.pbtxt, or have one of {filenames} in the version's folder",
    )


def _model_file(config: ModelConfig, version_folders: Sequence[Path], backends: BackendRegistry) -> ModelFile | None:
    """The file of the backend and platform; where they leave several, the one that is there, else the usual one."""
    backend = backends.find(config.backend)
    fitting = [file for file in backend.model_files if config.platform in ("", file.platform)] if backend else []
    for file in fitting:
        if any((folder / file.name).exists() for folder in version_folders):
            return file
    return fitting[0] if fitting else None
