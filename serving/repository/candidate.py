"""A model as it lies in its folder or comes with a request: what would be served once it is loaded.

Reads the file system: for threads.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backend import LoadOverrides
from serving.backends.registry import BackendRegistry
from serving.config.completion import ENSEMBLE, complete_kind, fill_defaults
from serving.config.config_json import parse_config_json
from serving.config.locations import NOWHERE
from serving.config.pbtxt import CONFIG_FILENAME, WrittenConfig, locate_error, read_pbtxt
from serving.config.supported_fields import ignored_fields_note
from serving.config.validation import check_structure, ensemble_members
from serving.findings import InvalidConfig
from serving.repository.failures import poll_failed
from serving.repository.folders import FolderState, ModelFolder, is_plain_name, versions_in, write_files
from serving.repository.roots import FoundModel, Roots
from serving.spec import inner_path
from sluice.errors import ErrorCode, SluiceError

Signature = tuple[object, ...]
"""Equal for two looks at a version between which nothing of it has changed."""
ResolveMember = Callable[[str, str], str]
"""What the model is called that a step names, by `model_namespace` and `model_name`."""


@dataclass(frozen=True, slots=True)
class ModelCandidate:
    """What a folder and a configuration say of a model. `versions` are those that its policy wants, ascending.

    It holds its folder until whoever read it lets go of that.
    """

    name: str
    folder: ModelFolder
    config: ModelConfig
    versions: tuple[int, ...]
    signatures: Mapping[int, Signature]
    state: FolderState
    notes: tuple[str, ...] = ()
    is_overridden: bool = False
    """Whether its configuration came with a request, over that of its folder."""

    @property
    def members(self) -> tuple[str, ...]:
        """The models that an ensemble calls; none for any other."""
        return ensemble_members(self.config)

    def is_intact(self, version: int) -> bool:
        """Whether the files that the version was found with are still as they were; new ones do not count."""
        try:
            now = set(self.folder.state().of_version(version))
        except OSError:
            return False
        return now.issuperset(self.state.of_version(version))

    @property
    def is_ensemble(self) -> bool:
        return bool(self.config.HasField("ensemble_scheduling"))


def read_candidate(
    name: str,
    folder: ModelFolder,
    backends: BackendRegistry,
    *,
    is_strict: bool,
    config_json: str | None = None,
    member: ResolveMember | None = None,
) -> ModelCandidate:
    """The model in `folder`, with its own configuration or the given one; requests call it `name`.

    Raises SluiceError INVALID with what is wrong. `is_strict`: config.pbtxt must be there.
    """
    written = _config(folder.path, is_strict, config_json)
    candidate = _candidate(name, folder.path.name, folder, written, backends, member)
    return replace(candidate, is_overridden=config_json is not None)


def read_override(name: str, overrides: LoadOverrides, backends: BackendRegistry) -> ModelCandidate:
    """The model that a request brings along, in a temporary folder of its own. Raises as `read_candidate`."""
    if overrides.config_json is None:
        raise SluiceError(ErrorCode.INVALID, "Load parameter 'config' must be specified for model file override")
    written = WrittenConfig(parse_config_json(overrides.config_json), NOWHERE)
    folder = write_files(overrides.files)
    try:
        return _candidate(name, name, folder, written, backends)
    except BaseException:
        folder.remove()
        raise


def _config(path: Path, is_strict: bool, config_json: str | None) -> WrittenConfig:
    if config_json is not None:
        return WrittenConfig(parse_config_json(config_json), NOWHERE)
    file = path / CONFIG_FILENAME
    if not is_strict and not file.exists():
        return WrittenConfig(ModelConfig(), NOWHERE)
    return read_pbtxt(file)


def _candidate(
    name: str,
    folder_name: str,
    folder: ModelFolder,
    written: WrittenConfig,
    backends: BackendRegistry,
    member: ResolveMember | None = None,
) -> ModelCandidate:
    config = written.config
    try:
        available = versions_in(folder.path)
        complete_kind(config, folder_name, [folder.path / str(version) for version in reversed(available)], backends)
        state = folder.state()
    except OSError as error:
        raise SluiceError(ErrorCode.INVALID, f"the folder of model '{name}' cannot be read: {error}") from None
    _check(written, folder.path / CONFIG_FILENAME)
    run_agents(config, folder.path)
    unobeyed = ignored_fields_note(config, backends.find(config.backend or ENSEMBLE), written.locations)
    config.name = name
    if member is not None:
        for step in config.ensemble_scheduling.step:
            step.model_name = member(step.model_namespace, step.model_name)
    fill_defaults(config)
    versions = _wanted_versions(config, available)
    signatures = {version: _signature(config, folder, state, version) for version in versions}
    return ModelCandidate(name, folder, config, versions, signatures, state, (*written.lines, *unobeyed))


def _check(written: WrittenConfig, file: Path) -> None:
    """Raises InvalidConfig, with lines where it was read from `file`."""
    try:
        check_structure(written.config)
    except InvalidConfig as error:
        raise error if written.locations is NOWHERE else locate_error(error, written.locations, file) from None


def _wanted_versions(config: ModelConfig, available: Sequence[int]) -> tuple[int, ...]:
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return tuple(available)
        case "specific":
            return tuple(version for version in available if version in policy.specific.versions)
        case _:
            count = policy.latest.num_versions
            return tuple(available[-count:]) if count else ()


def _signature(config: ModelConfig, folder: ModelFolder, state: FolderState, version: int) -> Signature:
    return config.SerializeToString(deterministic=True), folder.origin, state.of_version(version)


@dataclass(frozen=True, slots=True)
class ModelReading:
    """Either a candidate or an error. `cause` is set where there is a folder, but no model can be made of it."""

    name: str
    candidate: ModelCandidate | None = None
    error: SluiceError | None = None
    cause: SluiceError | None = None
    version: int = 1
    """Which version the index blames: the highest there is."""
    has_folder: bool = False


def read_model(
    roots: Roots, name: str, backends: BackendRegistry, *, is_strict: bool, overrides: LoadOverrides | None = None
) -> ModelReading:
    """Reads the file system or the network: for a thread. The candidate's folder is held for the caller."""
    found = None
    try:
        found = _find(roots, name)
        candidate = _read_found(roots, found, name, backends, is_strict, overrides)
    except SluiceError as error:
        # What a request brings along is its sender's to repair; what lies in the repository everybody should see.
        cause = error if overrides is None else None
        version = _highest_version(found)
        _let_go(found)
        return ModelReading(name, error=poll_failed(name, error), cause=cause, version=version, has_folder=True)
    if candidate is None or found is None or candidate.folder is not found.folder:
        _let_go(found)
    if candidate is None:
        return ModelReading(name, error=poll_failed(name))
    return ModelReading(name, candidate, has_folder=found is not None)


def _find(roots: Roots, name: str) -> FoundModel | None:
    try:
        return roots.open(name)
    except OSError as error:
        raise SluiceError(ErrorCode.INVALID, f"the folder of model '{name}' cannot be read: {error}") from None


def _read_found(
    roots: Roots,
    found: FoundModel | None,
    name: str,
    backends: BackendRegistry,
    is_strict: bool,
    overrides: LoadOverrides | None,
) -> ModelCandidate | None:
    if overrides is not None and overrides.files and is_plain_name(name):
        return read_override(name, overrides, backends)
    if found is None:
        return None
    config_json = overrides.config_json if overrides else None
    return read_candidate(
        name,
        found.folder,
        backends,
        is_strict=is_strict,
        config_json=config_json,
        member=lambda namespace, step: roots.member(found.namespace, namespace, step),
    )


def _highest_version(found: FoundModel | None) -> int:
    try:
        return max(versions_in(found.folder.path), default=1) if found is not None else 1
    except OSError:
        return 1


def _let_go(found: FoundModel | None) -> None:
    if found is not None and found.folder.let_go():
        found.folder.remove()


CHECKSUM = "checksum"
_ALGORITHMS = ("md5", "sha1", "sha256")


def run_agents(config: ModelConfig, folder: Path) -> None:
    """Let each agent look at `folder`, in order: for a thread.

    Raises SluiceError INVALID for what an agent refuses, and UNIMPLEMENTED for an agent that there is not.
    """
    for agent in config.model_repository_agents.agents:
        if agent.name != CHECKSUM:
            message = f"unable to find repository agent '{agent.name}' of model '{config.name}'; there is '{CHECKSUM}'"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message)
        _check_sums(agent.parameters, folder)


def _check_sums(expected: Mapping[str, str], folder: Path) -> None:
    """Parameters of the checksum agent: `ALGORITHM:PATH`, inside the model's folder, with the sum in hex."""
    for key, wanted in sorted(expected.items()):
        algorithm, colon, path = key.partition(":")
        if not colon:
            raise SluiceError(ErrorCode.INVALID, f"failed to parse key: {key}; it should be ALGORITHM:PATH")
        if algorithm.lower() not in _ALGORITHMS:
            listed = ", ".join(each.upper() for each in _ALGORITHMS)
            message = f"Unsupported checksum algorithm: {algorithm}; supported are {listed}"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message)
        found = _sum(folder / inner_path(path), path, algorithm.lower())
        if found != wanted.strip().lower():
            message = f"Mismatched {algorithm.upper()} hash for file {path}, expect: {wanted}, got: {found}"
            raise SluiceError(ErrorCode.INVALID, message)


def _sum(file: Path, path: str, algorithm: str) -> str:
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, algorithm).hexdigest()
    except OSError as error:
        message = f"failed to open text file for read {path}: {error.strerror}"
        raise SluiceError(ErrorCode.INVALID, message) from None
