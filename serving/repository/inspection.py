"""Every model of one or more repositories, inspected."""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backend import Backend, RuntimeReport
from serving.backends.ensemble.graph import graph_of
from serving.backends.ensemble.step_models import check_step_models, decoupled_steps
from serving.backends.registry import BackendRegistry
from serving.batching.sequences.inputs import read_initial_states
from serving.batching.warm_up import read_samples
from serving.config.completion import ENSEMBLE
from serving.config.locations import NOWHERE
from serving.config.pbtxt import CONFIG_FILENAME, WrittenConfig, read_pbtxt
from serving.config.supported_fields import ignored_field_findings
from serving.config.validation import check_tensors
from serving.findings import Finding, error_findings
from serving.job import InferJob
from serving.model import Model
from serving.repository.candidate import ModelCandidate, ResolveMember, read_candidate
from serving.repository.folders import ModelFolder, Root, list_versions
from serving.repository.loader import load_order
from serving.repository.roots import SEPARATOR, FoundModel, Roots
from serving.repository.routing import PARAMETER, configured_weights
from serving.request import LATEST
from serving.spec import ModelSource, build_spec, inner_path
from sluice.errors import SluiceError


class Verdict(StrEnum):
    """Of one model."""

    OK = "ok"
    NOTES = "notes"
    """It would load, and not everything is as it is written."""
    ERROR = "error"
    """It would not load."""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """`folders`: where it lies, more than one where several repositories have it. `versions`: what would be served.

    `config_file` is where lines of findings are; "" where the model has none.
    """

    name: str
    folders: tuple[str, ...]
    config_file: str = ""
    backend: str = ""
    versions: tuple[int, ...] = ()
    notes: tuple[Finding, ...] = ()
    errors: tuple[Finding, ...] = ()
    runtime: RuntimeReport | None = None
    """Of language models that would load."""

    @property
    def verdict(self) -> Verdict:
        if self.errors:
            return Verdict.ERROR
        return Verdict.NOTES if self.notes else Verdict.OK

    def with_errors(self, *errors: Finding) -> "ModelReport":
        """Besides those that there are."""
        return replace(self, errors=(*self.errors, *errors))


def load_errors(candidate: ModelCandidate, place: str, registry: BackendRegistry) -> Iterator[Finding]:
    """Why it would not load. `place` is the folder as messages have it."""
    if not candidate.versions:
        yield _no_version(candidate, place)
    try:
        backend = registry.get(candidate.config.backend or ENSEMBLE)
    except SluiceError as error:
        yield Finding(error.message, "backend" if candidate.config.backend else "platform")
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
    yield from _failure(lambda: read_initial_states(source), "sequence_batching.state")
    if not of_tensors:
        yield from _failure(lambda: read_samples(config, source.folder), "model_warmup")


def _failure(check: Callable[[], object], path: str = "") -> Iterator[Finding]:
    """What `check` raises; `path` is what it looks at."""
    try:
        check()
    except SluiceError as error:
        for each in error_findings(error):
            yield each if each.path else Finding(each.message, path, each.fix)


def _no_version(candidate: ModelCandidate, place: str) -> Finding:
    message = f"at least one version must be available under the version policy of model '{candidate.name}'"
    available = list_versions(candidate.folder.path)
    if available:
        listed = ", ".join(map(str, available))
        fix = f"version_policy {{ specific {{ versions: [{available[-1]}] }} }}; there are {listed}"
        return Finding(message, "version_policy", fix)
    return Finding(f"{message}; its folder has no version", fix=f"{place}/1 with the model's file in it")


def _version_errors(source: ModelSource, backend: Backend) -> Iterator[Finding]:
    config = source.config
    yield from _failure(lambda: backend.check(source))
    if config.default_model_filename and not _chooses_file(config, backend):
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
    fix = f'default_model_filename: "{there[0]}"' if len(there) == 1 and path == "default_model_filename" else ""
    yield Finding(message, path, fix)


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


def _chooses_file(config: ModelConfig, backend: Backend) -> bool:
    """Whether the device's compute capability chooses the file."""
    return "cc_model_filenames" in backend.supported_fields and bool(config.cc_model_filenames)


def machine_notes(candidate: ModelCandidate, backend: Backend) -> Iterator[Finding]:
    """What would be missed where it is served: this machine, or the devices of a file's capability, may be others."""
    yield from backend.machine_findings(candidate.config)
    for version in candidate.versions if _chooses_file(candidate.config, backend) else ():
        source = ModelSource(candidate.folder.path, version, candidate.config)
        for _, filename in sorted(candidate.config.cc_model_filenames.items()):
            yield from _missing_file(source, filename, "cc_model_filenames")


_ALMOST_VERSION = re.compile(r"[vV]?_?[0-9][0-9._]*")


@dataclass(frozen=True, slots=True)
class InspectedModel:
    """A model as its folder has it. `candidate` is None where no model can be made of that."""

    report: ModelReport
    written: WrittenConfig
    candidate: ModelCandidate | None = None


def inspect_folder(
    name: str, folder: ModelFolder, place: str, registry: BackendRegistry, member: ResolveMember | None = None
) -> InspectedModel:
    """`place` is the folder as messages have it; `member` as `read_candidate` takes it."""
    file = folder.path / CONFIG_FILENAME
    report = ModelReport(name, (place,), f"{place}/{CONFIG_FILENAME}" if file.exists() else "")
    written = WrittenConfig(ModelConfig(), NOWHERE)
    try:
        if report.config_file:
            written = read_pbtxt(file)
        candidate = read_candidate(name, folder, registry, is_strict=False, member=member)
    except SluiceError as error:
        errors = written.locations.locate_all(error_findings(error))
        return InspectedModel(replace(report, errors=errors), written)
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
    return InspectedModel(report, written, candidate)


def _runtime(candidate: ModelCandidate, backend: Backend | None) -> RuntimeReport | None:
    """What would run its newest version; None where the backend does not say, and where it would not load."""
    if backend is None or not candidate.versions:
        return None
    try:
        return backend.check(ModelSource(candidate.folder.path, candidate.versions[-1], candidate.config))
    except SluiceError:
        return None  # it is among the errors


def _unobeyed(written: ModelConfig, candidate: ModelCandidate, backend: Backend | None) -> list[Finding]:
    """Of what is written; the candidate's configuration has defaults besides, and the backend that files tell."""
    asked = ModelConfig()
    asked.CopyFrom(written)
    asked.backend, asked.platform = candidate.config.backend, candidate.config.platform
    return ignored_field_findings(asked, backend)


def _folder_notes(folder: Path) -> Iterator[Finding]:
    """Folders that look like versions and are none."""
    known = {str(version) for version in list_versions(folder)}
    for each in sorted(folder.iterdir()):
        if each.is_dir() and each.name not in known and _ALMOST_VERSION.fullmatch(each.name):
            number = re.sub(r"\D", " ", each.name).split()[0].lstrip("0") or "1"
            message = f"folder '{each.name}' is no version and is not served: versions are whole numbers from 1"
            yield Finding(message, fix=f"mv {each.name} {number}")


class _DeclaredModel(Model):
    """A model that is not loaded: what its configuration declares."""

    def __init__(self, candidate: ModelCandidate) -> None:
        super().__init__(candidate.config, build_spec(candidate.config, candidate.versions[-1]))

    def _start(self, job: InferJob) -> None:
        raise AssertionError("nobody asks a model that is not loaded")

    async def close(self) -> None:
        pass


def with_ensembles(models: Mapping[str, InspectedModel]) -> dict[str, ModelReport]:
    """The reports of all models, with what is wrong between ensembles and their members."""
    reports = {name: each.report for name, each in models.items()}
    candidates = {name: each.candidate for name, each in models.items() if each.candidate is not None}
    order, circular = load_order({name: each.members for name, each in candidates.items()})
    for name, reason in circular.items():
        reports[name] = reports[name].with_errors(
            *models[name].written.locations.locate_all((Finding(reason, "ensemble_scheduling"),))
        )
    # Members come before their ensembles, so that what is wrong with one is known to those above it.
    for name in order:
        if candidates[name].is_ensemble:
            found = tuple(_findings(candidates[name], candidates, reports))
            reports[name] = reports[name].with_errors(*models[name].written.locations.locate_all(found))
    return reports


def _findings(
    ensemble: ModelCandidate, candidates: Mapping[str, ModelCandidate], reports: Mapping[str, ModelReport]
) -> Iterator[Finding]:
    found = list(_members(ensemble, candidates, reports))
    yield from found
    if not found:
        yield from _tensors(ensemble, candidates)


def _members(
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
            message = f"ensemble '{name}' depends on '{member}' which would not load"
            yield Finding(message, f"{path}.model_name")
        elif step.model_version != LATEST and step.model_version not in candidates[member].versions:
            listed = ", ".join(map(str, candidates[member].versions))
            yield Finding(
                f"ensemble '{name}' depends on '{member}' whose required version {step.model_version} is not loaded.",
                f"{path}.model_version",
                f"model_version: -1 for the newest; served are {listed}",
            )


def _tensors(ensemble: ModelCandidate, candidates: Mapping[str, ModelCandidate]) -> Iterator[Finding]:
    """Only where every member declares its tensors: of the others, the files tell when they are loaded."""
    members = [candidates[step.model_name] for step in ensemble.config.ensemble_scheduling.step]
    if not ensemble.versions or not all(each.config.input and each.config.output for each in members):
        return
    spec, graph = build_spec(ensemble.config, ensemble.versions[-1]), graph_of(ensemble.config)
    models = [_DeclaredModel(each) for each in members]
    try:
        check_step_models(spec, graph, models)
        decoupled_steps(spec, graph, models)
    except SluiceError as error:
        for each in error_findings(error):
            yield Finding(each.message, each.path or "ensemble_scheduling", each.fix)


def inspect_repositories(
    roots: Sequence[Root], registry: BackendRegistry, *, has_namespaces: bool = False
) -> list[ModelReport]:
    """A report of each model, by name. Reads folders: for a thread.

    Raises SluiceError and OSError where a root cannot be read.
    """
    together = Roots(roots, has_namespaces=has_namespaces)
    names = together.names()
    models = {name: _inspect(together, _places(roots, name), name, registry) for name in names}
    reports = with_ensembles(models)
    return [reports[name] for name in names]


def _places(roots: Sequence[Root], name: str) -> tuple[str, ...]:
    plain = name.rpartition(SEPARATOR)[2]
    return tuple(root.location(plain) for root in roots if root.has(plain))


def _inspect(roots: Roots, places: tuple[str, ...], name: str, registry: BackendRegistry) -> InspectedModel:
    try:
        found = roots.open(name)
    except (SluiceError, OSError) as error:
        return _unread(name, places, error)
    if found is None:
        return _unread(name, places, FileNotFoundError(f"the folder of model '{name}' has gone"))
    try:
        place = places[0] if len(places) == 1 else str(found.folder.path)
        return _inspect_found(roots, found, name, place, registry)
    finally:
        if found.folder.release():
            found.folder.remove()


def _inspect_found(roots: Roots, found: FoundModel, name: str, place: str, registry: BackendRegistry) -> InspectedModel:
    def member(namespace: str, step: str) -> str:
        return roots.member(found.namespace, namespace, step)

    try:
        return inspect_folder(name, found.folder, place, registry, member)
    except OSError as error:
        return _unread(name, (place,), error)


def _unread(name: str, places: tuple[str, ...], error: Exception) -> InspectedModel:
    found = error_findings(error) if isinstance(error, SluiceError) else (Finding(f"it cannot be read: {error}"),)
    return InspectedModel(ModelReport(name, places, errors=found), WrittenConfig(ModelConfig(), NOWHERE))
