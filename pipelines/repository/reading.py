"""What a name stands for in the repository's folders or in a load request, or why it stands for nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import SluiceError
from pipelines.repository.candidate import Candidate, read_candidate, read_override
from pipelines.repository.failures import poll_failed
from pipelines.repository.folders import find_model, is_plain_name, versions_in
from pipelines.repository.types import LoadOverrides


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


def read_model(roots: Sequence[Path], name: str, *, is_strict: bool, overrides: LoadOverrides | None = None) -> Reading:
    """Reads the file system: for a thread."""
    path = None
    try:
        path = find_model(roots, name)
        candidate = _candidate(path, name, is_strict, overrides)
    except SluiceError as error:
        # What a request brings along is its sender's to repair; what lies in the repository everybody should see.
        cause = error if overrides is None else None
        version = _highest_version(path)
        return Reading(name, error=poll_failed(name, error), cause=cause, version=version, has_folder=True)
    if candidate is None:
        return Reading(name, error=poll_failed(name))
    return Reading(name, candidate, has_folder=path is not None)


def _candidate(path: Path | None, name: str, is_strict: bool, overrides: LoadOverrides | None) -> Candidate | None:
    if overrides is not None and overrides.files and is_plain_name(name):
        return read_override(name, overrides)
    if path is None:
        return None
    return read_candidate(name, path, is_strict=is_strict, config_json=overrides.config_json if overrides else None)


def _highest_version(path: Path | None) -> int:
    try:
        return max(versions_in(path), default=1) if path is not None else 1
    except OSError:
        return 1
