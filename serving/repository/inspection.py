"""Inspection of a repository (`sluice repository check`): a report of each model. Reads files: for threads."""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError
from sluice.serving.backend import Backend, RuntimeReport
from sluice.serving.backends.ensemble.graph import check_step_models, find_decoupled_steps, parse_graph
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.batching.sequences.inputs import read_initial_states
from sluice.serving.batching.warm_up import read_samples
from sluice.serving.config.completion import ENSEMBLE
from sluice.serving.config.locations import NOWHERE
from sluice.serving.config.pbtxt import CONFIG_FILENAME, WrittenConfig, read_text, scan_pbtxt
from sluice.serving.config.supported_fields import ignored_field_findings
from sluice.serving.config.validation import check_active_instances, check_tensors
from sluice.serving.findings import Finding, InvalidConfig, error_findings
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.repository.candidate import ModelCandidate, build_candidate
from sluice.serving.repository.folders import Root, list_versions
from sluice.serving.repository.loader import (
    check_model_file,
    chooses_file,
    label_file_errors,
    load_order,
    missing_file,
)
from sluice.serving.repository.roots import SEPARATOR, FoundModel, Roots
from sluice.serving.repository.routing import PARAMETER, configured_weights
from sluice.serving.request import LATEST
from sluice.serving.spec import ModelSource, build_spec

_ALMOST_VERSION = re.compile(r"[vV]?_?[0-9][0-9._]*")


class Verdict(StrEnum):
    """Outcome of a model's inspection."""

    OK = "ok"
    NOTES = "notes"
    """It would load, with notes on what is not served as written."""
    ERROR = "error"
    """It would not load."""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The findings of one model's inspection.

    `folders` are its locations, more than one where several repositories have it. `config_file` is the file that lines
    of findings refer to, "" where it has none. `versions` are those that would be served.
    """

    name: str
    folders: tuple[str, ...]
    config_file: str = ""
    backend: str = ""
    versions: tuple[int, ...] = ()
    notes: tuple[Finding, ...] = ()
    errors: tuple[Finding, ...] = ()
    runtime: RuntimeReport | None = None
    """Set for language models that would load."""

    @property
    def verdict(self) -> Verdict:
        if self.errors:
            return Verdict.ERROR
        return Verdict.NOTES if self.notes else Verdict.OK

    def with_errors(self, *errors: Finding) -> "ModelReport":
        return replace(self, errors=(*self.errors, *errors))


@dataclass(frozen=True, slots=True)
class InspectedModel:
    """An inspected folder. `candidate` is None where it holds no valid model."""

    report: ModelReport
    written: WrittenConfig
    candidate: ModelCandidate | None = None


def inspect_repositories(
    roots: Sequence[Root], registry: BackendRegistry, *, has_namespaces: bool = False
) -> list[ModelReport]:
    """Return a report of each model, by name. Raises SluiceError and OSError where a root cannot be read."""
    together = Roots(roots, has_namespaces=has_namespaces)
    names = together.names()
    models = {name: _inspect(together, _locations(roots, name), name, registry) for name in names}
    reports = _check_ensembles(models)
    return [reports[name] for name in names]


def _locations(roots: Sequence[Root], name: str) -> tuple[str, ...]:
    plain = name.rpartition(SEPARATOR)[2]
    return tuple(root.location(plain) for root in roots if root.has(plain))


def _inspect(roots: Roots, locations: tuple[str, ...], name: str, registry: BackendRegistry) -> InspectedModel:
    try:
        found = roots.open(name)
    except (SluiceError, OSError) as error:
        return _unread(name, locations, error)
    if found is None:
        return _unread(name, locations, FileNotFoundError(f"the folder of model '{name}' has gone"))
    try:
        location = locations[0] if len(locations) == 1 else str(found.folder.path)
        return _inspect_folder(name, found, location, registry, roots)
    except OSError as error:
        return _unread(name, (location,), error)
    finally:
        if found.folder.release():
            found.folder.remove()


def _unread(name: str, locations: tuple[str, ...], error: Exception) -> InspectedModel:
    found = error_findings(error) if isinstance(error, SluiceError) else (Finding(f"it cannot be read: {error}"),)
    return InspectedModel(ModelReport(name, locations, errors=found), WrittenConfig(ModelConfig(), NOWHERE))


def _inspect_folder(
    name: str, found: FoundModel, location: str, registry: BackendRegistry, roots: Roots
) -> InspectedModel:
    """Inspect one model. `location` is its folder in messages."""
    folder = found.folder
    member = partial(roots.member, found.namespace)
    file = folder.path / CONFIG_FILENAME
    report = ModelReport(name, (location,), f"{location}/{CONFIG_FILENAME}" if file.exists() else "")
    written, errors = WrittenConfig(ModelConfig(), NOWHERE), list[Finding]()
    try:
        if report.config_file:
            written, errors = scan_pbtxt(read_text(file))
        is_partial = bool(errors)
        if errors and not written.config.ListFields():
            raise InvalidConfig(errors)
        as_written = WrittenConfig(ModelConfig(), written.locations, written.notes)
        as_written.config.CopyFrom(written.config)
        candidate = build_candidate(name, folder.path.name, folder, as_written, registry, member, file, errors)
    except SluiceError as error:
        located = written.locations.locate_all(error_findings(error))
        return InspectedModel(replace(report, errors=located), written)
    backend = registry.find(candidate.config.backend or ENSEMBLE)
    runtimes = dict[int, RuntimeReport | None]()
    load_errors = list(_load_errors(candidate, location, registry, runtimes, is_partial=is_partial))
    notes = (
        *written.notes,
        *_ignored_fields(written.config, candidate, backend),
        *(_machine_notes(candidate, backend) if backend is not None else ()),
        *_folder_notes(folder.path),
    )
    report = replace(
        report,
        backend=candidate.config.backend or ENSEMBLE,
        versions=candidate.versions,
        notes=tuple(sorted(written.locations.locate_all(notes), key=lambda each: each.line or 0)),
        errors=tuple(dict.fromkeys(written.locations.locate_all([*errors, *load_errors]))),
        runtime=runtimes.get(candidate.versions[-1]) if candidate.versions else None,
    )
    return InspectedModel(report, written, candidate)


def _ignored_fields(written: ModelConfig, candidate: ModelCandidate, backend: Backend | None) -> list[Finding]:
    """Return findings on ignored fields as written, without defaults, for the backend that the files tell."""
    config = deepcopy(written)
    config.backend, config.platform = candidate.config.backend, candidate.config.platform
    return ignored_field_findings(config, backend)


def _folder_notes(folder: Path) -> Iterator[Finding]:
    """Yield notes on folders that look like versions and are none."""
    known = {str(version) for version in list_versions(folder)}
    for each in sorted(folder.iterdir()):
        if each.is_dir() and each.name not in known and _ALMOST_VERSION.fullmatch(each.name):
            number = re.sub(r"\D", " ", each.name).split()[0].lstrip("0") or "1"
            message = f"folder '{each.name}' is no version and is not served: versions are whole numbers from 1"
            yield Finding(message, fix=f"mv {each.name} {number}")


def _load_errors(
    candidate: ModelCandidate,
    location: str,
    registry: BackendRegistry,
    runtimes: dict[int, RuntimeReport | None],
    *,
    is_partial: bool,
) -> Iterator[Finding]:
    """Yield the errors with which the model would not load, and put the runtime of each version that would load into
    `runtimes`. `location` is its folder in messages.

    `is_partial`: the configuration lacks statements that cannot be read, so what a backend misses in it is no error.
    """
    if not candidate.versions:
        yield _no_version(candidate, location)
    if not candidate.config.backend and candidate.config.platform != ENSEMBLE:
        return  # nobody knows the backend, which is an error already
    try:
        backend = registry.get(candidate.config.backend or ENSEMBLE)
    except SluiceError as error:
        path = "backend" if candidate.config.backend else "platform"
        yield from (replace(each, path=path) for each in error_findings(error))
        return
    config = deepcopy(candidate.config)
    config.default_model_filename = config.default_model_filename or backend.default_model_filename
    yield from _raised_findings(lambda: configured_weights(config), f'parameters["{PARAMETER}"]')
    of_tensors = list(_raised_findings(lambda: check_tensors(config, is_complete=False)))
    yield from of_tensors
    yield from _raised_findings(lambda: check_active_instances(config))
    for version in candidate.versions:
        source = ModelSource(candidate.folder.path, version, config)
        yield from _version_errors(source, backend, runtimes, is_partial=is_partial)
    source = ModelSource(candidate.folder.path, candidate.versions[-1] if candidate.versions else 1, config)
    yield from (each for error in label_file_errors(source) for each in error_findings(error))
    yield from _raised_findings(lambda: read_initial_states(source), "sequence_batching.state")
    if not of_tensors:
        yield from _raised_findings(lambda: read_samples(config, source.folder), "model_warmup")


def _raised_findings(check: Callable[[], object], path: str = "") -> Iterator[Finding]:
    """Yield the findings that `check` raises. `path` is the field that it checks."""
    try:
        check()
    except SluiceError as error:
        for each in error_findings(error):
            yield each if each.path else Finding(each.message, path, each.fix)


def _no_version(candidate: ModelCandidate, location: str) -> Finding:
    message = f"at least one version must be available under the version policy of model '{candidate.name}'"
    available = list_versions(candidate.folder.path)
    if available:
        listed = ", ".join(map(str, available))
        fix = f"version_policy {{ specific {{ versions: [{available[-1]}] }} }}; there are {listed}"
        return Finding(message, "version_policy", fix)
    return Finding(f"{message}; its folder has no version", fix=f"{location}/1 with the model's file in it")


def _version_errors(
    source: ModelSource, backend: Backend, runtimes: dict[int, RuntimeReport | None], *, is_partial: bool
) -> Iterator[Finding]:
    def check() -> None:
        runtimes[source.version] = backend.check(source)

    missing = list(_raised_findings(lambda: check_model_file(source, backend)))
    if missing:
        yield from missing
        return
    yield from (each for each in _raised_findings(check) if not is_partial or not each.path)


def _machine_notes(candidate: ModelCandidate, backend: Backend) -> Iterator[Finding]:
    """Yield notes on what is missing here, and may be there on the machine that serves the model."""
    yield from backend.machine_findings(candidate.config)
    for version in candidate.versions:
        yield from backend.file_findings(_version_source(candidate, version, backend))
    for version in candidate.versions if chooses_file(candidate.config, backend) else ():
        source = ModelSource(candidate.folder.path, version, candidate.config)
        for _, filename in sorted(candidate.config.cc_model_filenames.items()):
            missing = missing_file(source, filename, "cc_model_filenames")
            if missing is not None:
                yield missing


def _version_source(candidate: ModelCandidate, version: int, backend: Backend) -> ModelSource:
    config = deepcopy(candidate.config)
    config.default_model_filename = config.default_model_filename or backend.default_model_filename
    return ModelSource(candidate.folder.path, version, config)


def _check_ensembles(models: Mapping[str, InspectedModel]) -> dict[str, ModelReport]:
    """Return the reports of all models, with errors between ensembles and their members."""
    reports = {name: each.report for name, each in models.items()}
    candidates = {name: each.candidate for name, each in models.items() if each.candidate is not None}
    order, circular = load_order({name: each.members for name, each in candidates.items()})
    for name, reason in circular.items():
        reports[name] = reports[name].with_errors(
            *models[name].written.locations.locate_all((Finding(reason, "ensemble_scheduling"),))
        )
    # Members come before their ensembles, which need their verdicts.
    for name in order:
        if candidates[name].is_ensemble:
            found = tuple(_check_ensemble(candidates[name], candidates, reports))
            reports[name] = reports[name].with_errors(*models[name].written.locations.locate_all(found))
    return reports


def _check_ensemble(
    ensemble: ModelCandidate, candidates: Mapping[str, ModelCandidate], reports: Mapping[str, ModelReport]
) -> Iterator[Finding]:
    found = list(_check_members(ensemble, candidates, reports))
    yield from found
    if not found and not reports[ensemble.name].errors:
        yield from _check_ensemble_tensors(ensemble, candidates)


def _check_members(
    ensemble: ModelCandidate, candidates: Mapping[str, ModelCandidate], reports: Mapping[str, ModelReport]
) -> Iterator[Finding]:
    name = ensemble.name
    for index, step in enumerate(ensemble.config.ensemble_scheduling.step):
        path = f"ensemble_scheduling.step[{index}]"
        member = step.model_name
        if member not in reports:
            near = difflib.get_close_matches(member, reports, n=1)
            yield Finding(
                f"ensemble {name} contains models that are not available or ambiguous: {member}",
                f"{path}.model_name",
                f'model_name: "{near[0]}"' if near else f"a folder {member} with that model",
            )
        elif reports[member].verdict is Verdict.ERROR:
            yield Finding(f"ensemble '{name}' depends on '{member}' which would not load", f"{path}.model_name")
        elif step.model_version != LATEST and step.model_version not in candidates[member].versions:
            listed = ", ".join(map(str, candidates[member].versions))
            yield Finding(
                f"ensemble '{name}' depends on '{member}' whose required version {step.model_version} is not loaded.",
                f"{path}.model_version",
                f"model_version: -1 for the newest; served are {listed}",
            )


def _check_ensemble_tensors(ensemble: ModelCandidate, candidates: Mapping[str, ModelCandidate]) -> Iterator[Finding]:
    """Check the tensors between steps, where every member declares its own. Others are known only at the load."""
    members = [candidates[step.model_name] for step in ensemble.config.ensemble_scheduling.step]
    if not ensemble.versions or not all(each.config.input and each.config.output for each in members):
        return
    spec, graph = build_spec(ensemble.config, ensemble.versions[-1]), parse_graph(ensemble.config)
    models = [_DeclaredModel(each) for each in members]
    try:
        check_step_models(spec, graph, models)
        find_decoupled_steps(spec, graph, models)
    except SluiceError as error:
        for each in error_findings(error):
            yield Finding(each.message, each.path or "ensemble_scheduling", each.fix)


class _DeclaredModel(Model):
    """A model that is not loaded, for its declared signature."""

    def __init__(self, candidate: ModelCandidate) -> None:
        super().__init__(candidate.config, build_spec(candidate.config, candidate.versions[-1]))

    def _start(self, job: InferJob) -> None:
        raise AssertionError("nobody asks a model that is not loaded")

    async def close(self) -> None:
        pass
