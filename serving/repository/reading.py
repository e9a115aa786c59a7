"""What a name stands for in the repository's folders or in a load request, or why it stands for nothing."""

from dataclasses import dataclass

from serving.backend import LoadOverrides
from serving.backends.registry import BackendRegistry
from serving.repository.candidate import Candidate, read_candidate, read_override
from serving.repository.failures import poll_failed
from serving.repository.folders import is_plain_name, versions_in
from serving.repository.roots import Found, Roots
from sluice.errors import ErrorCode, SluiceError


@dataclass(frozen=True, slots=True)
class Reading:
    """Either a candidate or an error. `cause` is set where there is a folder, but no model can be made of it."""

    name: str
    candidate: Candidate | None = None
    error: SluiceError | None = None
    cause: SluiceError | None = None
    version: int = 1
    """Which version the index blames: the highest there is."""
    has_folder: bool = False


def read_model(
    roots: Roots, name: str, backends: BackendRegistry, *, is_strict: bool, overrides: LoadOverrides | None = None
) -> Reading:
    """Reads the file system or the network: for a thread. The candidate's folder is held for the caller."""
    found = None
    try:
        found = _find(roots, name)
        candidate = _candidate(roots, found, name, backends, is_strict, overrides)
    except SluiceError as error:
        # What a request brings along is its sender's to repair; what lies in the repository everybody should see.
        cause = error if overrides is None else None
        version = _highest_version(found)
        _let_go(found)
        return Reading(name, error=poll_failed(name, error), cause=cause, version=version, has_folder=True)
    if candidate is None or found is None or candidate.folder is not found.folder:
        _let_go(found)
    if candidate is None:
        return Reading(name, error=poll_failed(name))
    return Reading(name, candidate, has_folder=found is not None)


def _find(roots: Roots, name: str) -> Found | None:
    try:
        return roots.open(name)
    except OSError as error:
        raise SluiceError(ErrorCode.INVALID, f"the folder of model '{name}' cannot be read: {error}") from None


def _candidate(
    roots: Roots,
    found: Found | None,
    name: str,
    backends: BackendRegistry,
    is_strict: bool,
    overrides: LoadOverrides | None,
) -> Candidate | None:
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


def _highest_version(found: Found | None) -> int:
    try:
        return max(versions_in(found.folder.path), default=1) if found is not None else 1
    except OSError:
        return 1


def _let_go(found: Found | None) -> None:
    if found is not None and found.folder.let_go():
        found.folder.remove()
