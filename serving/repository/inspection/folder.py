"""One model's folder: its configuration, its versions, and whether the files are there that they name.

Reads the file system, but no model file: for threads.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backend import Backend, RuntimeReport
from serving.backends.registry import BackendRegistry
from serving.config.completion import ENSEMBLE
from serving.config.locations import NOWHERE
from serving.config.pbtxt import CONFIG_FILENAME, WrittenConfig, read_written
from serving.config.supported_fields import ignored_field_findings
from serving.findings import ConfigFinding, error_findings
from serving.repository.candidate import Candidate, read_candidate
from serving.repository.folders import ModelFolder, versions_in
from serving.repository.inspection.files import load_errors, machine_notes
from serving.repository.inspection.report import ModelReport
from serving.spec import ModelSource
from sluice.errors import SluiceError

Member = Callable[[str, str], str]
_ALMOST_VERSION = re.compile(r"[vV]?_?[0-9][0-9._]*")


@dataclass(frozen=True, slots=True)
class Inspected:
    """A model as its folder has it. `candidate` is None where no model can be made of that."""

    report: ModelReport
    written: WrittenConfig
    candidate: Candidate | None = None


def inspect_folder(
    name: str, folder: ModelFolder, place: str, registry: BackendRegistry, member: Member | None = None
) -> Inspected:
    """`place` is the folder as messages have it; `member` as `read_candidate` takes it."""
    file = folder.path / CONFIG_FILENAME
    report = ModelReport(name, (place,), f"{place}/{CONFIG_FILENAME}" if file.exists() else "")
    written = WrittenConfig(ModelConfig(), NOWHERE)
    try:
        if report.config_file:
            written = read_written(file)
        candidate = read_candidate(name, folder, registry, is_strict=False, member=member)
    except SluiceError as error:
        errors = written.locations.locate_all(error_findings(error))
        return Inspected(replace(report, errors=errors), written)
    backend = registry.find(candidate.config.backend or ENSEMBLE)
    notes = (
        *written.notes,
        *_unobeyed(written.config, candidate, backend),
        *(machine_notes(candidate, backend) if backend is not None else ()),
        *_folder_notes(folder.path),
    )
    report = replace(
        report,
        backend=candidate.config.backend or ENSEMBLE,
        versions=candidate.versions,
        notes=tuple(sorted(written.locations.locate_all(notes), key=lambda each: each.line or 0)),
        errors=written.locations.locate_all(load_errors(candidate, place, registry)),
        runtime=_runtime(candidate, backend),
    )
    return Inspected(report, written, candidate)


def _runtime(candidate: Candidate, backend: Backend | None) -> RuntimeReport | None:
    """What would run its newest version; None where the backend does not say, and where it would not load."""
    if backend is None or not candidate.versions:
        return None
    try:
        return backend.check(ModelSource(candidate.folder.path, candidate.versions[-1], candidate.config))
    except SluiceError:
        return None  # it is among the errors


def _unobeyed(written: ModelConfig, candidate: Candidate, backend: Backend | None) -> list[ConfigFinding]:
    """Of what is written; the candidate's configuration has defaults besides, and the backend that files tell."""
    asked = ModelConfig()
    asked.CopyFrom(written)
    asked.backend, asked.platform = candidate.config.backend, candidate.config.platform
    return ignored_field_findings(asked, backend)


def _folder_notes(folder: Path) -> Iterator[ConfigFinding]:
    """Folders that look like versions and are none."""
    known = {str(version) for version in versions_in(folder)}
    for each in sorted(folder.iterdir()):
        if each.is_dir() and each.name not in known and _ALMOST_VERSION.fullmatch(each.name):
            number = re.sub(r"\D", " ", each.name).split()[0].lstrip("0") or "1"
            message = f"folder '{each.name}' is no version and is not served: versions are whole numbers from 1"
            yield ConfigFinding(message, remedy=f"mv {each.name} {number}")
