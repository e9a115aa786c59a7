"""Ensembles over the models of the given repositories: whether each step has its model, and their tensors fit."""

import difflib
from collections.abc import Iterator, Mapping

from serving.backends.ensemble.graph import graph_of
from serving.backends.ensemble.step_models import check_step_models, decoupled_steps
from serving.findings import ConfigFinding, error_findings
from serving.job import InferJob
from serving.model import Model
from serving.repository.candidate import Candidate
from serving.repository.dependencies import load_order
from serving.repository.inspection.folder import Inspected
from serving.repository.inspection.report import ModelReport, Verdict
from serving.request import LATEST
from serving.spec import build_spec
from sluice.errors import SluiceError


class _DeclaredModel(Model):
    """A model that is not loaded: what its configuration declares."""

    def __init__(self, candidate: Candidate) -> None:
        super().__init__(candidate.config, build_spec(candidate.config, candidate.versions[-1]))

    def _start(self, job: InferJob) -> None:
        raise AssertionError("nobody asks a model that is not loaded")

    async def close(self) -> None:
        pass


def with_ensembles(models: Mapping[str, Inspected]) -> dict[str, ModelReport]:
    """The reports of all models, with what is wrong between ensembles and their members."""
    reports = {name: each.report for name, each in models.items()}
    candidates = {name: each.candidate for name, each in models.items() if each.candidate is not None}
    order, circular = load_order({name: each.members for name, each in candidates.items()})
    for name, reason in circular.items():
        reports[name] = reports[name].with_errors(
            *models[name].written.locations.locate_all((ConfigFinding(reason, "ensemble_scheduling"),))
        )
    # Members come before their ensembles, so that what is wrong with one is known to those above it.
    for name in order:
        if candidates[name].is_ensemble:
            found = tuple(_findings(candidates[name], candidates, reports))
            reports[name] = reports[name].with_errors(*models[name].written.locations.locate_all(found))
    return reports


def _findings(
    ensemble: Candidate, candidates: Mapping[str, Candidate], reports: Mapping[str, ModelReport]
) -> Iterator[ConfigFinding]:
    found = list(_members(ensemble, candidates, reports))
    yield from found
    if not found:
        yield from _tensors(ensemble, candidates)


def _members(
    ensemble: Candidate, candidates: Mapping[str, Candidate], reports: Mapping[str, ModelReport]
) -> Iterator[ConfigFinding]:
    name = ensemble.name
    for index, step in enumerate(ensemble.config.ensemble_scheduling.step):
        path = f"ensemble_scheduling.step[{index}]"
        member = step.model_name
        if member not in reports:
            near = difflib.get_close_matches(member, reports, n=1)
            yield ConfigFinding(
                f"ensemble {name} contains models that are not available or ambiguous: {member}",
                f"{path}.model_name",
                f'model_name: "{near[0]}"' if near else f"a folder {member} with that model",
            )
        elif reports[member].verdict is Verdict.ERROR:
            message = f"ensemble '{name}' depends on '{member}' which would not load"
            yield ConfigFinding(message, f"{path}.model_name")
        elif step.model_version != LATEST and step.model_version not in candidates[member].versions:
            listed = ", ".join(map(str, candidates[member].versions))
            yield ConfigFinding(
                f"ensemble '{name}' depends on '{member}' whose required version {step.model_version} is not loaded.",
                f"{path}.model_version",
                f"model_version: -1 for the newest; served are {listed}",
            )


def _tensors(ensemble: Candidate, candidates: Mapping[str, Candidate]) -> Iterator[ConfigFinding]:
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
            yield ConfigFinding(each.message, each.path or "ensemble_scheduling", each.remedy)
