"""Plans a build: decides runtime, names and steps from the command line and the source. Writes nothing."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from sluice.cli.build.builder import RuntimeBuilder
from sluice.cli.build.configs import (
    MAX_BATCH_SIZE,
    TOKENIZER_FOLDER,
    RepositoryNames,
    ensemble_config,
    model_config,
    repository_names,
    stage_config,
)
from sluice.cli.build.openvino import OPENVINO_BUILDER
from sluice.cli.build.options import BuildOptions, UsageError
from sluice.cli.build.source import BuildSource, HubModel, SourceCheckpoint, nemo_steps
from sluice.cli.build.steps import BuildStep, CopyStep, ToolStep, WriteStep
from sluice.cli.build.tensorrt_llm import TENSORRT_LLM_BUILDER
from sluice.cli.checkpoint_files import tokenizer_file
from sluice.engine.config import EngineConfig, Runtime
from sluice.engine.model_folder import ModelFormat
from sluice.engine.runtimes import BUNDLED, best_runtime

VERSION = "1"
CONFIG = "config.pbtxt"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_BUILDERS: Mapping[Runtime, RuntimeBuilder] = MappingProxyType(
    {Runtime.OPENVINO: OPENVINO_BUILDER, Runtime.TENSORRT_LLM: TENSORRT_LLM_BUILDER}
)
TOKENIZER_DIRECTORY = "tokenizer"
"""Folder of the tokenizer beside a version that is not in HuggingFace's format, whose config.json is another file."""


@dataclass(frozen=True, slots=True)
class BuildPaths:
    """Folders that a build writes to: models to `models`, temporary files to `work`."""

    models: Path
    work: Path
    published: Path
    """The repository. The content of `models` is moved there last, where it is another folder."""

    def to_published(self, text: str) -> str:
        """Replace the folders of the build, which are removed with it, by those that a script would write to."""
        return text.replace(str(self.models), str(self.published)).replace(
            str(self.work), str(work_folder(self.published))
        )


def work_folder(repository: Path) -> Path:
    """Return the folder in which a script keeps its temporary files until it removes them."""
    return repository.with_name(f"{repository.name}.work")


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """The steps of a build from a checkpoint."""

    runtime: Runtime
    format: ModelFormat
    names: RepositoryNames
    steps: tuple[BuildStep, ...]

    @property
    def builder(self) -> RuntimeBuilder:
        return _BUILDERS[self.runtime]


def choose_build_runtime(options: BuildOptions, source: BuildSource) -> Runtime:
    """Choose the runtime to build for. Raises UsageError where it cannot do what the options request."""
    checkpoint = source if isinstance(source, SourceCheckpoint) else None
    runtime = options.runtime
    if runtime is Runtime.AUTO:
        runtime = _auto_runtime(options, checkpoint)
    if runtime not in _BUILDERS:
        raise UsageError(f"--runtime must be auto, {' or '.join(_BUILDERS)} for a build, got {runtime}")
    _BUILDERS[runtime].check(options, checkpoint)
    return runtime


def choose_names(options: BuildOptions, source: BuildSource) -> RepositoryNames:
    """Choose the names of the models. Raises UsageError for a name that no model can have."""
    name = options.name or source.name
    names = repository_names(options.layout, name)
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"--name must be letters, digits, '.', '_' and '-', and begin with one of the first two, got {name!r}"
        )
    if len(set(names.all)) != len(names.all):
        raise UsageError(f"--name {name} is a stage's name too; choose another, or --layout single")
    return names


def plan_fetch(
    options: BuildOptions, source: BuildSource, paths: BuildPaths
) -> tuple[tuple[BuildStep, ...], SourceCheckpoint]:
    """Return the steps that make a HuggingFace checkpoint of the source, and that checkpoint."""
    if isinstance(source, SourceCheckpoint):
        return (), source
    folder = paths.work / "huggingface"
    fetched = SourceCheckpoint(folder, ModelFormat.HUGGINGFACE, source.name, options.checkpoint)
    if isinstance(source, HubModel):
        return (_download(source, folder),), fetched
    steps = nemo_steps(source, paths.work, folder, options.nemo_folder, options.nemo_model_id)
    return tuple(steps), fetched


def make_plan(
    options: BuildOptions, source: SourceCheckpoint, runtime: Runtime, names: RepositoryNames, paths: BuildPaths
) -> BuildPlan:
    """Plan the steps from a checkpoint to the repository. Raises UsageError.

    The checkpoint need not exist yet: `plan_fetch` may have returned the steps that make it.
    """
    _check_tokenizer(options, source)
    existing = source if source.path.is_dir() else None
    version = paths.models / names.model / VERSION
    builder = _BUILDERS[runtime]
    built = builder.built_format(options, existing)
    steps = builder.steps(options, source, version, paths.work)
    all_steps = (*steps, *_packaging_steps(options, source, runtime, built, names, paths.models))
    return BuildPlan(runtime, built, names, all_steps)


def _auto_runtime(options: BuildOptions, source: SourceCheckpoint | None) -> Runtime:
    """Return the only runtime that has what the options request; else the one that `sluice serve` would choose, if it
    takes builds."""
    required = next((runtime for runtime, builder in _BUILDERS.items() if builder.is_required(options)), None)
    if required is not None:
        return required
    found = ModelFormat.HUGGINGFACE if source is None else source.format
    best = best_runtime(EngineConfig(model_path=""), found).runtime
    # What a runtime without builds of its own takes is a checkpoint, which the bundled one's build makes.
    return best if best in _BUILDERS else BUNDLED.runtime


def _download(source: HubModel, folder: Path) -> ToolStep:
    revision = ("--revision", source.revision) if source.revision else ()
    argv = ("hf", "download", source.hub_id, *revision, "--local-dir", str(folder))
    return ToolStep("download the checkpoint", argv, "hf", "pip install huggingface-hub", needs_gpu=False)


def _check_tokenizer(options: BuildOptions, source: SourceCheckpoint) -> None:
    folder = options.tokenizer or source.path
    if options.tokenizer is None and not source.path.is_dir():
        return
    if tokenizer_file(folder) is None:
        argument = "--tokenizer" if options.tokenizer else "CHECKPOINT"
        raise UsageError(
            f"{argument} {folder} has no tokenizer (tokenizer.json or tokenizer.model); name a folder that has the "
            "model's with --tokenizer"
        )


def _packaging_steps(
    options: BuildOptions,
    source: SourceCheckpoint,
    runtime: Runtime,
    built: ModelFormat,
    names: RepositoryNames,
    models: Path,
) -> Iterator[BuildStep]:
    """Yield the steps that write tokenizer, configurations and stages."""
    tokenizer = options.tokenizer or source.path
    parameters = _model_parameters(options, runtime, built)
    if built.has_own_config:
        yield CopyStep("put the tokenizer beside it", tokenizer, models / names.model / TOKENIZER_DIRECTORY, None)
        parameters["tokenizer_dir"] = TOKENIZER_DIRECTORY
    elif options.tokenizer is not None:
        yield CopyStep("put the tokenizer with it", tokenizer, models / names.model / TOKENIZER_DIRECTORY, None)
        parameters["tokenizer_dir"] = TOKENIZER_DIRECTORY
    max_batch_size = options.max_num_seqs or MAX_BATCH_SIZE
    text = model_config(names.model, _BUILDERS[runtime].backend, max_batch_size, parameters)
    yield WriteStep("say how the model is served", models / names.model / CONFIG, text)
    if names.has_stages:
        yield from _stage_steps(names, tokenizer, max_batch_size, models)


def _stage_steps(names: RepositoryNames, tokenizer: Path, max_batch_size: int, models: Path) -> Iterator[BuildStep]:
    for name, backend, parameters in (
        (names.preprocessing, "preprocessing", {"add_special_tokens": "true"}),
        (names.postprocessing, "postprocessing", {"skip_special_tokens": "true"}),
    ):
        yield CopyStep(f"give {name} the tokenizer", tokenizer, models / name / TOKENIZER_FOLDER, None)
        text = stage_config(name, backend, max_batch_size, parameters)
        yield WriteStep(f"say how {name} is served", models / name / CONFIG, text)
    # An ensemble has no files, but Triton wants a folder for its version, and stores keep no empty folders.
    readme = "The steps are in config.pbtxt.\n"
    yield WriteStep("give the ensemble a version", models / names.ensemble / VERSION / "README", readme)
    yield WriteStep("join the stages", models / names.ensemble / CONFIG, ensemble_config(names, max_batch_size))


def _model_parameters(options: BuildOptions, runtime: Runtime, built: ModelFormat) -> dict[str, str]:
    """Return the parameters of the model's config.pbtxt, except those that its files contain (an engine's limits)."""
    parameters = {
        "runtime": runtime.value,
        "exclude_input_in_output": "true",
        **_BUILDERS[runtime].parameters(options, built),
        "kv_cache_dtype": "" if options.is_compiled else _unless_default(options.kv_cache_dtype, "auto"),
        "tensor_parallel_size": _unless_default(options.tensor_parallel_size, 1),
        "pipeline_parallel_size": _unless_default(options.pipeline_parallel_size, 1),
        "max_model_len": _unless_default(options.max_model_len, None),
        "max_num_seqs": _unless_default(options.max_num_seqs, None),
        "max_num_batched_tokens": _unless_default(options.max_num_batched_tokens, None),
        "max_beam_width": _unless_default(options.max_beam_width, 1),
    }
    return {key: value for key, value in parameters.items() if value}


def _unless_default(value: object, default: object) -> str:
    return "" if value == default else str(value)
