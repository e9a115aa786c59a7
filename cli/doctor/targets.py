"""From a path on the command line to the models to look at."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cli.doctor.findings import Finding, fail, note
from engine.config import EngineConfig, Runtime
from engine.model_folder import model_format
from engine.runtimes import RuntimeChoice
from gateway.checkpoint import find_cached, is_hub_id, model_name
from pipelines.llm.backend import LlmBackend
from pipelines.llm.setup import set_up
from serving.backends.registry import BackendRegistry
from serving.repository.candidate import read_candidate
from serving.repository.folders import ModelFolder, versions_in
from serving.spec import ModelSource
from sluice.errors import ErrorCode, SluiceError


@dataclass(frozen=True, slots=True)
class Target:
    """One model as it would be served; a finding in place of its configuration where it could not."""

    name: str
    config: EngineConfig | Finding
    tokenizer: Path | None = None
    """Its folder where that is not the model's."""
    choice: RuntimeChoice | None = None
    """The runtime, where it was chosen for the configuration."""


def find_targets(path: str, config: EngineConfig) -> Iterator[Target]:
    """The model of a folder, or every language model of a repository; `config` is the command line's.

    Raises SluiceError NOT_FOUND where `path` is neither.
    """
    folder = Path(path).expanduser()
    if not folder.exists() and is_hub_id(path):
        yield _of_hub(path, config)
    elif model_format(folder) is not None:
        yield Target(model_name(folder), _at(config, folder))
    elif versions := [each for each in _versions(folder) if model_format(each) is not None]:
        yield Target(folder.name, _at(config, versions[0]))
    elif folder.is_dir() and (models := list(_of_repository(folder, config))):
        yield from models
    elif not folder.is_dir():
        raise SluiceError(ErrorCode.NOT_FOUND, f"{path} is no folder; a MODEL is one, or ORG/NAME of the hub")
    else:
        raise SluiceError(
            ErrorCode.NOT_FOUND,
            f"{path} is neither a model's folder (config.json with weights, an IR, a compiled engine) nor a repository "
            "with a language model in it",
        )


def _at(config: EngineConfig, folder: Path, runtime: Runtime | None = None) -> EngineConfig:
    return msgspec.structs.replace(config, model_path=str(folder), runtime=runtime or config.runtime)


def _of_hub(name: str, config: EngineConfig) -> Target:
    folder = find_cached(name)
    if folder is None:
        text = "it is not in the hub's local cache, so nothing is known of it"
        return Target(name, note(name, text, f"`sluice serve {name}` downloads it"))
    return Target(model_name(folder), _at(config, folder))


def _versions(folder: Path) -> list[Path]:
    """Newest first."""
    return [folder / str(version) for version in sorted(versions_in(folder), reverse=True)] if folder.is_dir() else []


def _of_repository(repository: Path, config: EngineConfig) -> Iterator[Target]:
    registry = BackendRegistry()
    for folder in sorted(child for child in repository.iterdir() if child.is_dir()):
        try:
            candidate = read_candidate(folder.name, ModelFolder(folder), registry, is_strict=False)
        except SluiceError:
            continue  # `sluice repository check` says what is wrong with it
        if isinstance(registry.find(candidate.config.backend), LlmBackend) and candidate.versions:
            source = ModelSource(folder, max(candidate.versions), candidate.config)
            yield _of_source(source, config)


def _of_source(source: ModelSource, config: EngineConfig) -> Target:
    try:
        setup = set_up(source, lambda path, runtime: _at(config, Path(path), runtime))
    except SluiceError as error:
        return Target(source.name, fail(source.name, error.message, "see `sluice repository check`"))
    return Target(source.name, setup.engine, setup.checkpoint.tokenizer, setup.choice)
