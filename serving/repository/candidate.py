"""Model candidates: models read from folders or load requests, not loaded yet. Reads files: for threads."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError, invalid_argument
from sluice.serving.backend import LoadOverrides
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.config.completion import ENSEMBLE, complete_kind, complete_name, fill_defaults
from sluice.serving.config.config_json import parse_config_json
from sluice.serving.config.locations import NOWHERE
from sluice.serving.config.pbtxt import CONFIG_FILENAME, CONFIGS_FOLDER, WrittenConfig, locate_error, read_pbtxt
from sluice.serving.config.supported_fields import ignored_fields_note
from sluice.serving.config.validation import check_structure
from sluice.serving.findings import Finding, InvalidConfig, error_findings
from sluice.serving.repository.failures import poll_failed
from sluice.serving.repository.folders import (
    FileState,
    FolderState,
    ModelFolder,
    is_plain_name,
    list_versions,
    write_files,
)
from sluice.serving.repository.roots import FoundModel, Roots
from sluice.serving.spec import inner_path

CHECKSUM = "checksum"
_ALGORITHMS = ("md5", "sha1", "sha256")
ResolveMember = Callable[[str, str], str]
"""Returns the name of a step's model, from its `model_namespace` and `model_name`."""


class VersionSignature(NamedTuple):
    """Compares equal while nothing of a version has changed.

    `common` is all but the instance groups, `instances` are those and the files that a configuration is read from.
    """

    common: tuple[object, ...]
    instances: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class ModelCandidate:
    """A model's folder and configuration. `versions` are those that its version policy selects, ascending.

    The caller that reads a candidate releases its folder.
    """

    name: str
    folder: ModelFolder
    config: ModelConfig
    versions: tuple[int, ...]
    signatures: Mapping[int, VersionSignature]
    state: FolderState
    notes: tuple[str, ...] = ()
    is_overridden: bool = False
    """Whether its configuration came with a request, in place of the folder's."""
    namespace: str = ""
    """The namespace of its repository; "" for one that came with a request."""

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the models that an ensemble calls; empty for any other model."""
        return tuple(dict.fromkeys(step.model_name for step in self.config.ensemble_scheduling.step))

    def is_intact(self, version: int) -> bool:
        """Return whether the files that the version had are unchanged. New files do not count."""
        try:
            now = set(self.folder.state().of_version(version))
        except OSError:
            return False
        return now.issuperset(self.state.of_version(version))

    @property
    def is_ensemble(self) -> bool:
        return bool(self.config.HasField("ensemble_scheduling"))


@dataclass(frozen=True, slots=True)
class ModelReading:
    """The result of reading a model: a candidate or an error. `cause` is set for a folder that holds no valid model."""

    name: str
    candidate: ModelCandidate | None = None
    error: SluiceError | None = None
    cause: SluiceError | None = None
    version: int = 1
    """The version that the index lists with the error: the highest one."""
    has_folder: bool = False


def read_model(
    roots: Roots,
    name: str,
    backends: BackendRegistry,
    *,
    is_strict: bool,
    config_name: str = "",
    overrides: LoadOverrides | None = None,
) -> ModelReading:
    """Read a model from the repository or a request, on a thread. The caller releases the candidate's folder.

    `is_strict` and `config_name` are those of `read_candidate`.
    """
    found = None
    try:
        found = _open(roots, name)
        candidate = _read_found(roots, found, name, backends, is_strict, config_name, overrides)
    except SluiceError as error:
        # A request's own configuration is its sender's to repair; a broken folder is listed in the index.
        cause = error if overrides is None else None
        version = _highest_version(found)
        _release(found)
        return ModelReading(name, error=poll_failed(name, error), cause=cause, version=version, has_folder=True)
    if candidate is None or found is None or candidate.folder is not found.folder:
        _release(found)
    if candidate is None:
        return ModelReading(name, error=poll_failed(name))
    return ModelReading(name, candidate, has_folder=found is not None)


def _open(roots: Roots, name: str) -> FoundModel | None:
    try:
        return roots.open(name)
    except OSError as error:
        raise invalid_argument(f"the folder of model '{name}' cannot be read: {error}") from None


def _read_found(
    roots: Roots,
    found: FoundModel | None,
    name: str,
    backends: BackendRegistry,
    is_strict: bool,
    config_name: str,
    overrides: LoadOverrides | None,
) -> ModelCandidate | None:
    if overrides is not None and overrides.files and is_plain_name(name):
        return read_override(name, overrides, backends)
    if found is None:
        return None
    config_json = overrides.config_json if overrides else None
    candidate = read_candidate(
        name,
        found.folder,
        backends,
        is_strict=is_strict,
        config_name=config_name,
        config_json=config_json,
        member=partial(roots.member, found.namespace),
    )
    return replace(candidate, namespace=found.namespace)


def _highest_version(found: FoundModel | None) -> int:
    try:
        return max(list_versions(found.folder.path), default=1) if found is not None else 1
    except OSError:
        return 1


def _release(found: FoundModel | None) -> None:
    if found is not None and found.folder.release():
        found.folder.remove()


def read_candidate(
    name: str,
    folder: ModelFolder,
    backends: BackendRegistry,
    *,
    is_strict: bool,
    config_name: str = "",
    config_json: str | None = None,
    member: ResolveMember | None = None,
) -> ModelCandidate:
    """Read the model in `folder`, with its own configuration or the given one, under the name `name`.

    Where configs/NAME.pbtxt exists for `config_name`, it stands for config.pbtxt. Raises INVALID with the findings.
    With `is_strict`, one of them must exist.
    """
    file = folder.path / CONFIGS_FOLDER / f"{config_name}.pbtxt"
    if not config_name or not file.exists():
        file = folder.path / CONFIG_FILENAME
    written = _read_config(file, is_strict, config_json)
    candidate = build_candidate(name, folder.path.name, folder, written, backends, member, file)
    return replace(candidate, is_overridden=config_json is not None)


def read_override(name: str, overrides: LoadOverrides, backends: BackendRegistry) -> ModelCandidate:
    """Read the model that a load request contains, in a temporary folder. Raises as `read_candidate`."""
    if overrides.config_json is None:
        raise invalid_argument("Load parameter 'config' must be specified for model file override")
    written = WrittenConfig(parse_config_json(overrides.config_json), NOWHERE)
    folder = write_files(overrides.files)
    try:
        return build_candidate(name, name, folder, written, backends)
    except BaseException:
        folder.remove()
        raise


def _read_config(file: Path, is_strict: bool, config_json: str | None) -> WrittenConfig:
    if config_json is not None:
        return WrittenConfig(parse_config_json(config_json), NOWHERE)
    if not is_strict and not file.exists():
        return WrittenConfig(ModelConfig(), NOWHERE)
    return read_pbtxt(file)


def build_candidate(
    name: str,
    folder_name: str,
    folder: ModelFolder,
    written: WrittenConfig,
    backends: BackendRegistry,
    member: ResolveMember | None = None,
    file: Path | None = None,
    errors: list[Finding] | None = None,
) -> ModelCandidate:
    """Build the candidate of a configuration, which is completed in place.

    Raises SluiceError for what is wrong; with `errors`, findings are added there and the rest is built. In messages
    `file` is the configuration's.
    """
    config = written.config
    try:
        available = list_versions(folder.path)
        version_folders = [folder.path / str(version) for version in reversed(available)]
        with _collected(errors):
            complete_name(config, folder_name)
        with _collected(errors):
            complete_kind(config, version_folders, backends)
        state = folder.state()
    except OSError as error:
        raise invalid_argument(f"the folder of model '{name}' cannot be read: {error}") from None
    with _collected(errors):
        _check_config(written, file or folder.path / CONFIG_FILENAME)
    with _collected(errors):
        run_agents(config, folder.path)
    ignored = ignored_fields_note(config, backends.find(config.backend or ENSEMBLE), written.locations)
    config.name = name
    if member is not None:
        for step in config.ensemble_scheduling.step:
            step.model_name = member(step.model_namespace, step.model_name)
    fill_defaults(config)
    versions = _select_versions(config, available)
    common = deepcopy(config)
    common.ClearField("instance_group")
    serialized = common.SerializeToString(deterministic=True)
    instances = tuple(group.SerializeToString(deterministic=True) for group in config.instance_group)
    signatures = {}
    for version in versions:
        files: list[FileState] = []
        config_files: list[FileState] = []
        for each in state.of_version(version):
            (config_files if _is_config_file(each.path) else files).append(each)
        signatures[version] = VersionSignature((serialized, folder.origin, *files), (*instances, *config_files))
    return ModelCandidate(name, folder, config, versions, signatures, state, (*written.lines, *ignored))


@contextmanager
def _collected(errors: list[Finding] | None) -> Iterator[None]:
    """Add the findings of an error to `errors`; without `errors`, let it through."""
    try:
        yield
    except SluiceError as error:
        if errors is None:
            raise
        errors.extend(error_findings(error))


def _is_config_file(path: str) -> bool:
    return path == CONFIG_FILENAME or path.startswith(f"{CONFIGS_FOLDER}/")


def _check_config(written: WrittenConfig, file: Path) -> None:
    """Raise InvalidConfig with the lines in `file`, where the configuration was read from it."""
    try:
        check_structure(written.config)
    except InvalidConfig as error:
        raise error if written.locations is NOWHERE else locate_error(error, written.locations, file) from None


def _select_versions(config: ModelConfig, available: Sequence[int]) -> tuple[int, ...]:
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return tuple(available)
        case "specific":
            return tuple(version for version in available if version in policy.specific.versions)
        case _:
            count = policy.latest.num_versions
            return tuple(available[-count:]) if count else ()


def run_agents(config: ModelConfig, folder: Path) -> None:
    """Run repository agents over `folder`, in order. Raises INVALID where one rejects it, UNIMPLEMENTED if unknown."""
    for agent in config.model_repository_agents.agents:
        if agent.name != CHECKSUM:
            message = f"unable to find repository agent '{agent.name}' of model '{config.name}'; there is '{CHECKSUM}'"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message)
        _check_checksums(agent.parameters, folder)


def _check_checksums(expected: Mapping[str, str], folder: Path) -> None:
    """Check files of the model's folder. `expected` has a checksum in hex for each `ALGORITHM:PATH`."""
    for key, checksum in sorted(expected.items()):
        algorithm, colon, path = key.partition(":")
        if not colon:
            raise invalid_argument(f"failed to parse key: {key}; it should be ALGORITHM:PATH")
        if algorithm.lower() not in _ALGORITHMS:
            listed = ", ".join(each.upper() for each in _ALGORITHMS)
            message = f"Unsupported checksum algorithm: {algorithm}; supported are {listed}"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message)
        try:
            with (folder / inner_path(path)).open("rb") as content:
                found = hashlib.file_digest(content, algorithm.lower()).hexdigest()
        except OSError as error:
            raise invalid_argument(f"failed to open text file for read {path}: {error.strerror}") from None
        if found != checksum.strip().lower():
            message = f"Mismatched {algorithm.upper()} hash for file {path}, expect: {checksum}, got: {found}"
            raise invalid_argument(message)
