"""Finds the models that a MODEL argument names: a folder, a hub name, or the language models of a repository."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sluice.cli.doctor.findings import DoctorFinding, fail, note
from sluice.engine.config import EngineConfig, Runtime
from sluice.engine.model_folder import model_format
from sluice.engine.runtimes import RuntimeChoice
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.checkpoint import find_cached, is_hub_id, model_name
from sluice.pipelines.llm.backend import LlmBackend
from sluice.pipelines.llm.setup import set_up
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.repository.candidate import read_candidate
from sluice.serving.repository.folders import ModelFolder, list_versions
from sluice.serving.spec import ModelSource


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """One model to check. `config` is how it would be served, or a finding where it could not be."""

    name: str
    config: EngineConfig | DoctorFinding
    tokenizer: Path | None = None
    """The tokenizer's folder, where it is not the model's."""
    choice: RuntimeChoice | None = None
    """The runtime, where the model's configuration already chose one."""


def find_targets(path: str, config: EngineConfig) -> Iterator[ModelTarget]:
    """Yield the model in a folder, or every language model of a repository. `config` holds the command line's options.

    Raises SluiceError NOT_FOUND where `path` is neither.
    """
    folder = Path(path).expanduser()
    if not folder.exists() and is_hub_id(path):
        yield _hub_target(path, config)
    elif model_format(folder) is not None:
        yield ModelTarget(model_name(folder), _config_at(config, folder))
    elif versions := [each for each in _versions(folder) if model_format(each) is not None]:
        yield ModelTarget(folder.name, _config_at(config, versions[0]))
    elif folder.is_dir() and (models := list(_repository_targets(folder, config))):
        yield from models
    elif not folder.is_dir():
        raise SluiceError(ErrorCode.NOT_FOUND, f"{path} is no folder; a MODEL is one, or ORG/NAME of the hub")
    else:
        raise SluiceError(
            ErrorCode.NOT_FOUND,
            f"{path} is neither a model's folder (config.json with weights, an IR, a compiled engine) nor a repository "
            "with a language model in it",
        )


def _config_at(config: EngineConfig, folder: Path, runtime: Runtime | None = None) -> EngineConfig:
    return msgspec.structs.replace(config, model_path=str(folder), runtime=runtime or config.runtime)


def _hub_target(name: str, config: EngineConfig) -> ModelTarget:
    folder = find_cached(name)
    if folder is None:
        text = "it is not in the hub's local cache, so nothing is known of it"
        return ModelTarget(name, note(name, text, f"`sluice serve {name}` downloads it"))
    return ModelTarget(model_name(folder), _config_at(config, folder))


def _versions(folder: Path) -> list[Path]:
    """Return the folder's versions, newest first."""
    return [folder / str(version) for version in sorted(list_versions(folder), reverse=True)] if folder.is_dir() else []


def _repository_targets(repository: Path, config: EngineConfig) -> Iterator[ModelTarget]:
    registry = BackendRegistry()
    for folder in sorted(child for child in repository.iterdir() if child.is_dir()):
        try:
            candidate = read_candidate(folder.name, ModelFolder(folder), registry, is_strict=False)
        except SluiceError:
            continue  # `sluice repository check` says what is wrong with it
        if isinstance(registry.find(candidate.config.backend), LlmBackend) and candidate.versions:
            source = ModelSource(folder, max(candidate.versions), candidate.config)
            yield _source_target(source, config)


def _source_target(source: ModelSource, config: EngineConfig) -> ModelTarget:
    try:
        setup = set_up(source, lambda path, runtime: _config_at(config, Path(path), runtime))
    except SluiceError as error:
        return ModelTarget(source.name, fail(source.name, error.message, "see `sluice repository check`"))
    return ModelTarget(source.name, setup.engine, setup.checkpoint.tokenizer, setup.choice)
