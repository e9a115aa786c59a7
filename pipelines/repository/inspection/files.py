"""Whether a model's configuration and the files beside it would load: all that can be told without a backend's work.

Reads the file system, but no model file: for threads.
"""

from collections.abc import Callable, Iterator

from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.errors import SluiceError
from pipelines.backends.base import ModelSource
from pipelines.backends.registry import BackendRegistry
from pipelines.batching.sequences.initial_states import check_initial_states
from pipelines.repository.candidate import Candidate
from pipelines.repository.completion import ENSEMBLE, LLM_BACKENDS, has_gpu
from pipelines.repository.findings import Finding, findings_of
from pipelines.repository.folders import inner_path, versions_in
from pipelines.repository.inspection.language_models import check_language_model
from pipelines.repository.routing import PARAMETER, configured_weights
from pipelines.repository.tensor_rules import TENSORRT
from pipelines.repository.validation import check_tensors
from pipelines.repository.warm_up import samples_of


def load_errors(candidate: Candidate, place: str, registry: BackendRegistry) -> Iterator[Finding]:
    """Why it would not load. `place` is the folder as messages have it."""
    if not candidate.versions:
        yield _no_version(candidate, place)
    try:
        filename = registry.get(candidate.config.backend or ENSEMBLE).default_model_filename
    except SluiceError as error:
        yield Finding(error.message, "backend" if candidate.config.backend else "platform")
        return
    config = ModelConfig()
    config.CopyFrom(candidate.config)
    config.default_model_filename = config.default_model_filename or filename
    yield from _failure(lambda: configured_weights(config), f'parameters["{PARAMETER}"]')
    of_tensors = list(_failure(lambda: check_tensors(config, is_complete=False)))
    yield from of_tensors
    for version in candidate.versions:
        yield from _version_errors(ModelSource(candidate.folder.path, version, config))
    source = ModelSource(candidate.folder.path, candidate.versions[-1] if candidate.versions else 1, config)
    yield from _label_errors(source)
    yield from _failure(lambda: check_initial_states(source), "sequence_batching.state")
    if not of_tensors:
        yield from _failure(lambda: samples_of(config, source.folder), "model_warmup")


def _failure(check: Callable[[], object], path: str = "") -> Iterator[Finding]:
    """What `check` raises; `path` is what it looks at."""
    try:
        check()
    except SluiceError as error:
        for each in findings_of(error):
            yield each if each.path else Finding(each.message, path, each.remedy)


def _no_version(candidate: Candidate, place: str) -> Finding:
    message = f"at least one version must be available under the version policy of model '{candidate.name}'"
    available = versions_in(candidate.folder.path)
    if available:
        listed = ", ".join(map(str, available))
        remedy = f"version_policy {{ specific {{ versions: [{available[-1]}] }} }}; there are {listed}"
        return Finding(message, "version_policy", remedy)
    return Finding(f"{message}; its folder has no version", remedy=f"{place}/1 with the model's file in it")


def _version_errors(source: ModelSource) -> Iterator[Finding]:
    config = source.config
    if config.backend in LLM_BACKENDS:
        yield from _failure(lambda: check_language_model(source))
        return
    if config.default_model_filename and not _has_plans(config):
        yield from _missing_file(source, config.default_model_filename, "default_model_filename")


def _missing_file(source: ModelSource, filename: str, path: str) -> Iterator[Finding]:
    try:
        inner = inner_path(filename)
    except SluiceError as error:
        yield Finding(error.message, path)
        return
    if (source.version_folder / inner).exists():
        return
    there = sorted(each.name for each in source.version_folder.iterdir() if not each.name.startswith("."))
    message = f"version {source.version} has no model file {inner}"
    if there:
        message += f"; its folder has {', '.join(there[:5])}"
    remedy = f'default_model_filename: "{there[0]}"' if len(there) == 1 and path == "default_model_filename" else ""
    yield Finding(message, path, remedy)


def _label_errors(source: ModelSource) -> Iterator[Finding]:
    for index, output in enumerate(source.config.output):
        path = f"output[{index}].label_filename"
        if not output.label_filename:
            continue
        try:
            label_file = source.folder / inner_path(output.label_filename)
        except SluiceError as error:
            yield Finding(error.message, path)
            continue
        if not label_file.is_file():
            yield Finding(f"there is no label file {label_file} for output '{output.name}'", path)


def _has_plans(config: ModelConfig) -> bool:
    """Whether the device chooses the file."""
    return bool(config.backend == TENSORRT and config.cc_model_filenames)


def device_notes(candidate: Candidate) -> Iterator[Finding]:
    """What would be missed where it is served: this machine, or the devices of a plan's capability, may be others."""
    if candidate.config.backend == TENSORRT and not has_gpu():
        yield Finding("a TensorRT plan needs an NVIDIA GPU, and this machine has none", "backend")
    for version in candidate.versions if _has_plans(candidate.config) else ():
        source = ModelSource(candidate.folder.path, version, candidate.config)
        for _, filename in sorted(candidate.config.cc_model_filenames.items()):
            yield from _missing_file(source, filename, "cc_model_filenames")
