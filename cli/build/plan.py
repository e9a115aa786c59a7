"""What a build does, in order: decided from the command line and what there is to build from."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig, Runtime
from sluice.errors import SluiceError
from engine.model_folder import ModelFormat
from engine.runtimes import choose_runtime, has_tensorrt_llm
from sluice.machine import num_gpus
from cli.build import openvino, tensorrt_llm
from cli.build.arguments import Dtype, Options
from cli.build.failures import AskedError
from cli.build.files import has_tokenizer
from cli.build.nemo import nemo_steps
from cli.build.source import Checkpoint, HubModel, Source
from cli.build.steps import Copy, Step, Tool, Write
from cli.build.texts import MAX_BATCH_SIZE, TOKENIZER_FOLDER, Names, ensemble_config, model_config, names_of, stage_config

VERSION = "1"
CONFIG = "config.pbtxt"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_BACKENDS = {Runtime.OPENVINO: "llm", Runtime.TENSORRT_LLM: "tensorrtllm"}
_OWN_TOKENIZER = "tokenizer"
"""Folder of the model's, where the version holds what is not HuggingFace's: config.json is another there."""
_NOT_HUGGINGFACE = (ModelFormat.TENSORRT_LLM_CHECKPOINT, ModelFormat.TENSORRT_LLM_ENGINE)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a build writes: models under `root`, what is wanted for a while only in `work`."""

    root: Path
    work: Path
    published: Path
    """What `root` is moved to in the end."""

    def lasting(self, text: str) -> str:
        """A command with places that are there when it is read: those of the build are gone with it."""
        return text.replace(str(self.root), str(self.published)).replace(
            str(self.work), str(work_folder(self.published))
        )


def work_folder(repository: Path) -> Path:
    """Where a script, which cleans up after itself, keeps what is wanted for a while only."""
    return repository.with_name(f"{repository.name}.work")


@dataclass(frozen=True, slots=True)
class Plan:
    """All steps of a build."""

    runtime: Runtime
    format: ModelFormat
    names: Names
    steps: tuple[Step, ...]


def choose(options: Options, source: Source) -> Runtime:
    """The runtime that is built for. Raises AskedError where it cannot build what is asked."""
    checkpoint = source if isinstance(source, Checkpoint) else None
    runtime = options.runtime
    if runtime is Runtime.AUTO:
        runtime = _made_for(options, checkpoint)
    if runtime is Runtime.OPENVINO:
        openvino.check(options, checkpoint)
    else:
        tensorrt_llm.check(options, checkpoint)
        tensorrt_llm.library_version(options)
    return runtime


def names(options: Options, source: Source) -> Names:
    """Raises AskedError for a name that no model can have."""
    name = options.name or source.name
    found = names_of(options.layout, name)
    if not _NAME.fullmatch(name):
        raise AskedError(
            f"--name must be letters, digits, '.', '_' and '-', and begin with one of the first two, got {name!r}"
        )
    if len(set(found.all)) != len(found.all):
        raise AskedError(f"--name {name} is a stage's name too; choose another, or --layout single")
    return found


def fetch_steps(options: Options, source: Source, places: Places) -> tuple[tuple[Step, ...], Checkpoint]:
    """What makes a HuggingFace checkpoint of it first, and that checkpoint."""
    if isinstance(source, Checkpoint):
        return (), source
    folder = places.work / "huggingface"
    made = Checkpoint(folder, ModelFormat.HUGGINGFACE, source.name, options.checkpoint)
    if isinstance(source, HubModel):
        return (_download(source, folder),), made
    steps = nemo_steps(source, places.work, folder, options.nemo_folder, options.nemo_model_id)
    return tuple(steps), made


def make_plan(options: Options, source: Checkpoint, runtime: Runtime, models: Names, places: Places) -> Plan:
    """From a checkpoint, which fetch_steps may have yet to make, to the repository. Raises AskedError."""
    _check_tokenizer(options, source)
    seen = source if source.path.is_dir() else None
    version = places.root / models.model / VERSION
    if runtime is Runtime.OPENVINO:
        kind, steps = openvino.format_of(seen), openvino.steps(options, source, version)
    else:
        kind, steps = tensorrt_llm.format_of(options, seen), tensorrt_llm.steps(options, source, version, places.work)
    all_steps = (*steps, *_around(options, source, runtime, kind, models, places.root))
    return Plan(runtime, kind, models, all_steps)


def _made_for(options: Options, source: Checkpoint | None) -> Runtime:
    """What was asked for may be one runtime's alone; else as `sluice serve` would choose."""
    if options.is_compiled or options.num_gpus > 1 or options.quantization in tensorrt_llm.ONLY_HERE:
        return Runtime.TENSORRT_LLM
    if source is None:
        return Runtime.TENSORRT_LLM if num_gpus() and has_tensorrt_llm() else Runtime.OPENVINO
    if source.format in _NOT_HUGGINGFACE:
        return Runtime.TENSORRT_LLM
    try:
        return choose_runtime(EngineConfig(model_path=str(source.path))).runtime
    except SluiceError as error:
        raise AskedError(error.message) from None


def _download(source: HubModel, folder: Path) -> Tool:
    revision = ("--revision", source.revision) if source.revision else ()
    argv = ("hf", "download", source.hub_id, *revision, "--local-dir", str(folder))
    return Tool("download the checkpoint", argv, "hf", "pip install huggingface-hub", wants_gpu=False)


def _check_tokenizer(options: Options, source: Checkpoint) -> None:
    folder = options.tokenizer or source.path
    if options.tokenizer is None and not source.path.is_dir():
        return
    if not has_tokenizer(folder):
        what = "--tokenizer" if options.tokenizer else "CHECKPOINT"
        raise AskedError(
            f"{what} {folder} has no tokenizer (tokenizer.json or tokenizer.model); name a folder that has the model's "
            "with --tokenizer"
        )


def _around(
    options: Options, source: Checkpoint, runtime: Runtime, kind: ModelFormat, models: Names, root: Path
) -> Iterator[Step]:
    """The tokenizer, configurations and stages."""
    tokenizer = options.tokenizer or source.path
    parameters = _parameters(options, runtime, kind)
    if kind in _NOT_HUGGINGFACE:
        folder = root / models.model / _OWN_TOKENIZER
        yield Copy("put the tokenizer beside it", tokenizer, folder, None)
        parameters["tokenizer_dir"] = _OWN_TOKENIZER
    elif options.tokenizer is not None:
        yield Copy("put the tokenizer with it", tokenizer, root / models.model / _OWN_TOKENIZER, None)
        parameters["tokenizer_dir"] = _OWN_TOKENIZER
    rows = options.max_num_seqs or MAX_BATCH_SIZE
    text = model_config(models.model, _BACKENDS[runtime], rows, parameters)
    yield Write("say how the model is served", root / models.model / CONFIG, text)
    if models.has_stages:
        yield from _stages(models, tokenizer, rows, root)


def _stages(models: Names, tokenizer: Path, rows: int, root: Path) -> Iterator[Step]:
    for name, backend, parameters in (
        (models.preprocessing, "preprocessing", {"add_special_tokens": "true"}),
        (models.postprocessing, "postprocessing", {"skip_special_tokens": "true"}),
    ):
        yield Copy(f"give {name} the tokenizer", tokenizer, root / name / TOKENIZER_FOLDER, None)
        yield Write(f"say how {name} is served", root / name / CONFIG, stage_config(name, backend, rows, parameters))
    # An ensemble has no files, but Triton wants a folder for its version, and stores keep no empty ones.
    note = "The steps are in config.pbtxt.\n"
    yield Write("give the ensemble a version", root / models.ensemble / VERSION / "README", note)
    yield Write("join the stages", root / models.ensemble / CONFIG, ensemble_config(models, rows))


def _parameters(options: Options, runtime: Runtime, kind: ModelFormat) -> dict[str, str]:
    """Of the model's config.pbtxt. What the files say themselves (an engine's limits) is not said again."""
    is_tensorrt = runtime is Runtime.TENSORRT_LLM
    said = {
        "runtime": runtime.value,
        "exclude_input_in_output": "true",
        "quantization": "" if is_tensorrt or kind is ModelFormat.OPENVINO_IR else _unless(options.quantization, "none"),
        "dtype": _dtype(options.dtype, is_tensorrt=is_tensorrt),
        "kv_cache_dtype": "" if options.is_compiled else _unless(options.kv_cache_dtype, "auto"),
        "tensor_parallel_size": _unless(options.tensor_parallel_size, 1),
        "pipeline_parallel_size": _unless(options.pipeline_parallel_size, 1),
        "max_model_len": _unless(options.max_model_len, None),
        "max_num_seqs": _unless(options.max_num_seqs, None),
        "max_num_batched_tokens": _unless(options.max_num_batched_tokens, None),
        "max_beam_width": _unless(options.max_beam_width, 1),
    }
    return {key: value for key, value in said.items() if value}


def _unless(value: object, usual: object) -> str:
    return "" if value == usual else str(value)


def _dtype(dtype: Dtype, *, is_tensorrt: bool) -> str:
    if dtype is Dtype.AUTO:
        return ""
    return dtype.value if is_tensorrt else openvino.DTYPES[dtype]
