"""Whether a model's configuration and the files beside it would load: all that can be told without a backend's work.

Reads the file system, but no model file: for threads.
"""

from collections.abc import Callable, Iterator

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backend import Backend
from serving.backends.registry import BackendRegistry
from serving.batching.sequences.inputs import check_initial_states
from serving.batching.warm_up import read_samples
from serving.config.completion import ENSEMBLE
from serving.config.validation import check_tensors
from serving.findings import ConfigFinding, error_findings
from serving.repository.candidate import Candidate
from serving.repository.folders import versions_in
from serving.repository.routing import PARAMETER, configured_weights
from serving.spec import ModelSource, inner_path
from sluice.errors import SluiceError


def load_errors(candidate: Candidate, place: str, registry: BackendRegistry) -> Iterator[ConfigFinding]:
    """Why it would not load. `place` is the folder as messages have it."""
    if not candidate.versions:
        yield _no_version(candidate, place)
    try:
        backend = registry.get(candidate.config.backend or ENSEMBLE)
    except SluiceError as error:
        yield ConfigFinding(error.message, "backend" if candidate.config.backend else "platform")
        return
    config = ModelConfig()
    config.CopyFrom(candidate.config)
    config.default_model_filename = config.default_model_filename or backend.default_model_filename
    yield from _failure(lambda: configured_weights(config), f'parameters["{PARAMETER}"]')
    of_tensors = list(_failure(lambda: check_tensors(config, is_complete=False)))
    yield from of_tensors
    for version in candidate.versions:
        yield from _version_errors(ModelSource(candidate.folder.path, version, config), backend)
    source = ModelSource(candidate.folder.path, candidate.versions[-1] if candidate.versions else 1, config)
    yield from _label_errors(source)
    yield from _failure(lambda: check_initial_states(source), "sequence_batching.state")
    if not of_tensors:
        yield from _failure(lambda: read_samples(config, source.folder), "model_warmup")


def _failure(check: Callable[[], object], path: str = "") -> Iterator[ConfigFinding]:
    """What `check` raises; `path` is what it looks at."""
    try:
        check()
    except SluiceError as error:
        for each in error_findings(error):
            yield each if each.path else ConfigFinding(each.message, path, each.remedy)


def _no_version(candidate: Candidate, place: str) -> ConfigFinding:
    message = f"at least one version must be available under the version policy of model '{candidate.name}'"
    available = versions_in(candidate.folder.path)
    if available:
        listed = ", ".join(map(str, available))
        remedy = f"version_policy {{ specific {{ versions: [{available[-1]}] }} }}; there are {listed}"
        return ConfigFinding(message, "version_policy", remedy)
    return ConfigFinding(f"{message}; its folder has no version", remedy=f"{place}/1 with the model's file in it")


def _version_errors(source: ModelSource, backend: Backend) -> Iterator[ConfigFinding]:
    config = source.config
    yield from _failure(lambda: backend.check(source))
    if config.default_model_filename and not _chooses_file(config, backend):
        yield from _missing_file(source, config.default_model_filename, "default_model_filename")


def _missing_file(source: ModelSource, filename: str, path: str) -> Iterator[ConfigFinding]:
    try:
        inner = inner_path(filename)
    except SluiceError as error:
        yield ConfigFinding(error.message, path)
        return
    if (source.version_folder / inner).exists():
        return
    there = sorted(each.name for each in source.version_folder.iterdir() if not each.name.startswith("."))
    message = f"version {source.version} has no model file {inner}"
    if there:
        message += f"; its folder has {', '.join(there[:5])}"
    remedy = f'default_model_filename: "{there[0]}"' if len(there) == 1 and path == "default_model_filename" else ""
    yield ConfigFinding(message, path, remedy)


def _label_errors(source: ModelSource) -> Iterator[ConfigFinding]:
    for index, output in enumerate(source.config.output):
        path = f"output[{index}].label_filename"
        if not output.label_filename:
            continue
        try:
            label_file = source.folder / inner_path(output.label_filename)
        except SluiceError as error:
            yield ConfigFinding(error.message, path)
            continue
        if not label_file.is_file():
            yield ConfigFinding(f"there is no label file {label_file} for output '{output.name}'", path)


def _chooses_file(config: ModelConfig, backend: Backend) -> bool:
    """Whether the device's compute capability chooses the file."""
    return "cc_model_filenames" in backend.supported_fields and bool(config.cc_model_filenames)


def machine_notes(candidate: Candidate, backend: Backend) -> Iterator[ConfigFinding]:
    """What would be missed where it is served: this machine, or the devices of a file's capability, may be others."""
    yield from backend.machine_findings(candidate.config)
    for version in candidate.versions if _chooses_file(candidate.config, backend) else ():
        source = ModelSource(candidate.folder.path, version, candidate.config)
        for _, filename in sorted(candidate.config.cc_model_filenames.items()):
            yield from _missing_file(source, filename, "cc_model_filenames")
