"""Completion: the fields that Triton fills in where a configuration leaves them out.

`complete_name` and `complete_kind` run once a model. They derive name, backend, platform and file name from each other
and from the folders. `fill_defaults` runs before and after `Backend.complete`, and is idempotent. `complete_tensors` is
for backends whose models all have the same tensors.
"""

import difflib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelInstanceGroup, ModelOutput

from sluice.errors import invalid
from sluice.machine import num_gpus
from sluice.serving.backend import ModelFile
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.batching.sequences.batcher import DEFAULT_IDLE_US
from sluice.serving.findings import invalid_field
from sluice.serving.tensors.datatypes import DATA_TYPES

ENSEMBLE = "ensemble"
_SIMILARITY = 0.4
"""Similarity from which a wrong platform is taken for a known one. It is low, as the platforms are few."""


def complete_name(config: ModelConfig, name: str) -> None:
    """Name a model by its folder. Raises InvalidConfig where it has another name."""
    written, config.name = config.name, name
    if written not in ("", name):
        raise invalid_field(
            f"unexpected directory name '{name}' for model '{written}', directory name must equal model name",
            "name",
            f'name: "{name}", or no name at all',
        )


def complete_kind(config: ModelConfig, version_folders: Sequence[Path], backends: BackendRegistry) -> None:
    """Fill in backend, platform and file name. Reads folders: for a thread. Raises InvalidConfig."""
    if config.platform == ENSEMBLE or config.HasField("ensemble_scheduling"):
        return
    if not config.backend and config.platform:
        config.backend = _find_by_platform(config, backends)
    if not config.backend:
        _complete_backend(config, version_folders, backends)
    file = _choose_model_file(config, version_folders, backends)
    if file is not None:
        config.platform = config.platform or file.platform
        config.default_model_filename = config.default_model_filename or file.name


def fill_defaults(config: ModelConfig) -> None:
    """Fill in Triton's defaults, in place."""
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    _drop_repeated_tensors(config)
    _fill_preferred_sizes(config)
    if config.HasField("sequence_batching") and not config.sequence_batching.max_sequence_idle_microseconds:
        config.sequence_batching.max_sequence_idle_microseconds = DEFAULT_IDLE_US
    if config.platform == ENSEMBLE:
        return
    for pinned in ("input_pinned_memory", "output_pinned_memory"):
        if not config.optimization.HasField(pinned):
            getattr(config.optimization, pinned).enable = True
    _fill_instance_groups(config)


def _drop_repeated_tensors(config: ModelConfig) -> None:
    """Drop declarations that are equal to an earlier one, as NVIDIA's ensemble for TensorRT-LLM has them."""
    for tensors in (config.input, config.output):
        for index in reversed(range(len(tensors))):
            if any(each == tensors[index] for each in tensors[:index]):
                del tensors[index]


def _fill_preferred_sizes(config: ModelConfig) -> None:
    """Let a batcher without preferred sizes prefer the largest."""
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
            group.kind = ModelInstanceGroup.KIND_GPU if group.gpus else ModelInstanceGroup.KIND_CPU
        if group.count < 1:
            group.count = 1


def has_gpu() -> bool:
    """Return whether the machine has an NVIDIA GPU. A backend may still be unable to use it."""
    return num_gpus() > 0


def _find_by_platform(config: ModelConfig, backends: BackendRegistry) -> str:
    platforms = {
        file.platform: backend.name
        for backend in backends.in_detection_order()
        for file in backend.model_files
        if file.platform
    }
    if config.platform in platforms:
        return platforms[config.platform]
    near = difflib.get_close_matches(config.platform, platforms, n=1, cutoff=_SIMILARITY)
    message = f"unexpected platform type '{config.platform}' for {config.name}"
    raise invalid_field(message, "platform", f'platform: "{near[0]}"' if near else "backend in place of platform")


def _complete_backend(config: ModelConfig, version_folders: Sequence[Path], backends: BackendRegistry) -> None:
    """Fill in the backend that the files tell, or as in Triton the name: `my.identity` is a model of `identity`."""
    config.backend = _find_by_files(version_folders, backends)
    named = backends.find(config.name.partition(".")[2]) if not config.backend else None
    if named is not None:
        config.backend = config.name.partition(".")[2]
        if not named.default_model_filename and not named.model_files:
            config.default_model_filename = config.default_model_filename or f"model.{config.backend}"
    config.backend = config.backend or _find_by_suffix(config.name, version_folders, backends)


def _find_by_files(version_folders: Sequence[Path], backends: BackendRegistry) -> str:
    """Return the backend that recognizes a version; "" where none does."""
    for backend in backends.in_detection_order():
        if any(backend.recognizes(folder) for folder in version_folders):
            return backend.name
    return ""


def _find_by_suffix(name: str, version_folders: Sequence[Path], backends: BackendRegistry) -> str:
    for folder in version_folders:
        custom = sorted(each.suffix[1:] for each in folder.glob("model.?*"))
        if custom:
            return custom[0]
    filenames = ", ".join(file.name for backend in backends.in_detection_order() for file in backend.model_files)
    raise invalid_field(
        f"Invalid model name: Could not determine backend for model '{name}' with no backend in model configuration. "
        "Expected model name of the form 'model.<backend_name>'.",
        fix=f"backend in config.pbtxt, or have one of {filenames} in the version's folder",
    )


def _choose_model_file(
    config: ModelConfig, version_folders: Sequence[Path], backends: BackendRegistry
) -> ModelFile | None:
    """Return the file of the backend and platform. Of several it is the one that exists, else the usual one."""
    backend = backends.find(config.backend)
    fitting = [file for file in backend.model_files if config.platform in ("", file.platform)] if backend else []
    for file in fitting:
        if any((folder / file.name).exists() for folder in version_folders):
            return file
    return fitting[0] if fitting else None


@dataclass(frozen=True, slots=True)
class DeclaredTensor:
    """An input or output that all models of a backend have. `dims` leave out the batch dimension."""

    name: str
    datatype: str
    dims: tuple[int, ...] = (1,)
    is_optional: bool = False

    @property
    def number(self) -> int:
        """The number of its type in a configuration."""
        return int(DataType.Value(DATA_TYPES[self.datatype].config_name))


def complete_tensors(
    config: ModelConfig, inputs: Sequence[DeclaredTensor], outputs: Sequence[DeclaredTensor]
) -> ModelConfig:
    """Return `config`, all inputs or outputs added where it has none. Raises INVALID where its own do not fit."""
    completed = deepcopy(config)
    if not completed.input:
        completed.input.extend(
            ModelInput(name=each.name, data_type=each.number, dims=each.dims, optional=each.is_optional)
            for each in inputs
        )
    if not completed.output:
        completed.output.extend(ModelOutput(name=each.name, data_type=each.number, dims=each.dims) for each in outputs)
    _check_declared(completed.name, "input", completed.input, inputs)
    _check_declared(completed.name, "output", completed.output, outputs)
    given = {each.name for each in completed.input}
    for each in inputs:
        if not each.is_optional and each.name not in given:
            raise invalid("input", f"model '{completed.name}' must declare the input '{each.name}' ({each.datatype})")
    return completed


def _check_declared(
    model: str, kind: str, given: Sequence[ModelInput] | Sequence[ModelOutput], known: Sequence[DeclaredTensor]
) -> None:
    by_name = {each.name: each for each in known}
    for tensor in given:
        expected = by_name.get(tensor.name)
        if expected is None:
            names = ", ".join(by_name)
            raise invalid(kind, f"model '{model}' declares the {kind} '{tensor.name}'; there are {names}")
        if tensor.data_type != expected.number:
            message = f"{kind} '{tensor.name}' of model '{model}' must be of type {expected.datatype}"
            raise invalid(kind, f"{message}, got {DataType.Name(tensor.data_type)}")
