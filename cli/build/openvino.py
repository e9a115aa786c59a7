"""Builds for OpenVINO: the checkpoint, with its weights compressed where requested, or an IR."""

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

from sluice.cli.build.builder import RuntimeBuilder
from sluice.cli.build.options import BuildOptions, Dtype, UsageError
from sluice.cli.build.source import SourceCheckpoint
from sluice.cli.build.steps import BuildStep, CompressStep, ConvertStep, CopyStep
from sluice.engine.model_folder import ModelFormat
from sluice.engine.models.weights.files import NONE, QUANTIZATIONS, compressed_file
from sluice.engine.runners.openvino.runtime import OPENVINO
from sluice.errors import SluiceError

_DTYPES = {Dtype.AUTO: "", Dtype.BFLOAT16: "bf16", Dtype.FLOAT32: "f32"}
"""The engine's names of the types."""


def _import_source() -> ModuleType:
    """Return the module that knows model folders, which imports OpenVINO. Raises UsageError where that fails."""
    try:
        from sluice.engine.runners.openvino import source
    except ImportError as error:
        raise UsageError(f"a build for OpenVINO needs it, and it cannot be imported: {error}") from None
    return source


def _check_build(options: BuildOptions, source: SourceCheckpoint | None) -> None:
    _check_options(options)
    if source is None:
        return
    folders = _import_source()
    try:
        kind = folders.check_folder(source.path)
    except SluiceError as error:
        raise UsageError(f"OpenVINO cannot run {source.path}: {error.message}") from None
    if kind is folders.FolderKind.IR and options.quantization != NONE:
        raise UsageError(
            f"--quantization {options.quantization}: {source.path} is an IR, whose weights are stored as they are; "
            "build from the HuggingFace checkpoint"
        )
    if options.quantization != NONE and any((source.path / compressed_file(each)).is_file() for each in QUANTIZATIONS):
        raise UsageError(
            f"--quantization {options.quantization}: the weights of {source.path} are compressed already; build from "
            "the original checkpoint, or leave --quantization out"
        )


def _check_options(options: BuildOptions) -> None:
    if options.is_compiled:
        raise UsageError("--compile makes TensorRT engines; it goes with --runtime tensorrt_llm")
    known = (NONE, *QUANTIZATIONS)
    if options.quantization not in known:
        raise UsageError(f"--quantization must be one of {', '.join(known)} for openvino, got {options.quantization!r}")
    if options.dtype is Dtype.FLOAT16:
        raise UsageError("--dtype must be auto, bfloat16 or float32 for openvino, got float16")
    if options.kv_cache_dtype not in OPENVINO.kv_cache_dtypes:
        allowed = ", ".join(OPENVINO.kv_cache_dtypes)
        raise UsageError(f"--kv-cache-dtype must be one of {allowed} for openvino, got {options.kv_cache_dtype!r}")
    if options.num_gpus > 1:
        raise UsageError("--tensor-parallel-size and --pipeline-parallel-size go with --runtime tensorrt_llm")
    if options.max_beam_width > 1:
        raise UsageError("--max-beam-width must be 1 for openvino: it has no beam search")


def _built_format(options: BuildOptions, source: SourceCheckpoint | None) -> ModelFormat:
    if source is None:
        return ModelFormat.HUGGINGFACE
    folders = _import_source()
    kind, _ = folders.identify_folder(source.path)
    return ModelFormat.HUGGINGFACE if kind is folders.FolderKind.CHECKPOINT else ModelFormat.OPENVINO_IR


def _build_steps(options: BuildOptions, source: SourceCheckpoint, target: Path, work: Path) -> Iterator[BuildStep]:
    folders = _import_source()
    kind = folders.identify_folder(source.path)[0] if source.path.is_dir() else folders.FolderKind.CHECKPOINT
    if kind is folders.FolderKind.CONVERTIBLE:
        yield ConvertStep(
            "convert the checkpoint to an OpenVINO IR",
            source.path,
            target,
            options.quantization,
            _weight_format(options, source),
            options.cache_path,
        )
    elif options.quantization != NONE:
        yield CompressStep(f"compress the weights to {options.quantization}", source.path, target, options.quantization)
    else:
        yield CopyStep("put the checkpoint in its place", source.path, target, source.format, options.is_linked)
        return
    yield CopyStep("put configuration and tokenizer beside it", source.path, target, None)


def _weight_format(options: BuildOptions, source: SourceCheckpoint) -> str:
    """Return optimum-intel's weight format, as the engine's own conversion chooses it: 16-bit weights stay fp16."""
    if options.quantization != NONE:
        return options.quantization
    stored = source.config.get("dtype", source.config.get("torch_dtype"))
    return "fp16" if stored in ("bfloat16", "float16") else "fp32"


def _parameters(options: BuildOptions, built: ModelFormat) -> dict[str, str]:
    is_stored_compressed = built is ModelFormat.OPENVINO_IR or options.quantization == NONE
    return {
        "quantization": "" if is_stored_compressed else options.quantization,
        "dtype": _DTYPES[options.dtype],
    }


OPENVINO_BUILDER = RuntimeBuilder(
    backend="llm",
    check=_check_build,
    is_required=lambda options: False,
    built_format=_built_format,
    steps=_build_steps,
    parameters=_parameters,
    title=lambda options: OPENVINO.title,
    library_version=lambda options: version("openvino"),
)
