"""Builds for TensorRT-LLM: the commands of its tools and of ModelOpt, for quantized checkpoints and engines."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import InvalidVersion, Version

from sluice.cli.build.builder import RuntimeBuilder
from sluice.cli.build.options import BuildOptions, Dtype, UsageError
from sluice.cli.build.source import SourceCheckpoint
from sluice.cli.build.steps import PYTHON, BuildStep, CopyStep, ToolStep
from sluice.cli.checkpoint_files import model_files, size_of
from sluice.engine.delegated.tensorrt_llm.library import FIRST_WITHOUT_ENGINES, LAST_WITH_ENGINES, MINIMUM, is_before
from sluice.engine.model_folder import ModelFormat

NEWEST = "1.2.1"
"""Release that the commands are for where TensorRT-LLM is not installed."""
_MODELOPT = "0.37.0"
"""Release of ModelOpt that TensorRT-LLM 1.2 requires."""
_MODELOPT_RENAMED = Version("0.46")
"""First release with the scripts in the folder hf_ptq."""

_CHECKPOINT_QUANTIZATIONS = ("none", "fp8", "nvfp4", "int4_awq", "w4a8_awq")
_ENGINE_QUANTIZATIONS = ("none", "fp8", "nvfp4", "int8_sq", "int4_awq", "w4a8_awq", "int8_wo", "int4_wo")
_KV_CACHE_DTYPES = ("auto", "fp8")
_OWN_QUANTIZATIONS = frozenset((*_CHECKPOINT_QUANTIZATIONS[1:], *_ENGINE_QUANTIZATIONS[1:]))

_EXAMPLES = (Path("/app/tensorrt_llm/examples"), Path("TensorRT-LLM/examples"))
"""Folders of the examples: in NVIDIA's images, and in a clone of the sources."""
_CONVERTERS = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "mixtral": ("llama", True),
    "qwen2": ("qwen", True),
    "qwen2_moe": ("qwen", True),
    "qwen3": ("qwen", True),
    "qwen3_moe": ("qwen", True),
    "phi": ("phi", False),
    "phi3": ("phi", False),
}
"""The folder of convert_checkpoint.py by model_type, and whether that script can split pipeline stages.

The scripts run without a GPU. Models of other types go through quantize.py, which can leave the precision alone."""


def _library_version(options: BuildOptions) -> Version:
    """Return the TensorRT-LLM that the commands are for. Raises UsageError for a version that they do not fit."""
    text = options.tensorrt_llm_version or _installed("tensorrt-llm") or NEWEST
    try:
        found = Version(text)
    except InvalidVersion:
        raise UsageError(f"--tensorrt-llm-version must be a version such as {NEWEST}, got {text!r}") from None
    if is_before(found, str(MINIMUM)):
        raise UsageError(f"TensorRT-LLM {text} is older than {MINIMUM}, the first that Sluice serves by; update it")
    if options.is_compiled and not is_before(found, FIRST_WITHOUT_ENGINES):
        raise UsageError(
            f"--compile: compiled engines ended with TensorRT-LLM {LAST_WITH_ENGINES}, and this is {text}. Leave "
            "--compile out: the checkpoint itself is served. Or use an older one (--tensorrt-llm-version "
            f"{NEWEST} --dry-run shows its commands)"
        )
    return found


def _check_build(options: BuildOptions, source: SourceCheckpoint | None) -> None:
    known = _ENGINE_QUANTIZATIONS if options.is_compiled else _CHECKPOINT_QUANTIZATIONS
    if options.quantization not in known:
        raise UsageError(_unknown_quantization(options, known))
    if options.kv_cache_dtype not in _KV_CACHE_DTYPES:
        allowed = " or ".join(_KV_CACHE_DTYPES)
        raise UsageError(f"--kv-cache-dtype must be {allowed} for tensorrt_llm, got {options.kv_cache_dtype!r}")
    if source is not None:
        _check_source(options, source)
    _library_version(options)


def _built_format(options: BuildOptions, source: SourceCheckpoint | None) -> ModelFormat:
    if options.is_compiled:
        return ModelFormat.TENSORRT_LLM_ENGINE
    return ModelFormat.HUGGINGFACE if source is None else source.format


def _build_steps(options: BuildOptions, source: SourceCheckpoint, target: Path, work: Path) -> Iterator[BuildStep]:
    library = _library_version(options)
    if options.is_compiled:
        yield from _compile_steps(options, source, target, work, library)
    elif options.quantization == "none":
        yield CopyStep("put the checkpoint in its place", source.path, target, source.format, options.is_linked)
    else:
        yield _modelopt_step(options, source, target)


def _unknown_quantization(options: BuildOptions, known: tuple[str, ...]) -> str:
    text = f"--quantization must be one of {', '.join(known)} for tensorrt_llm"
    text += " with --compile" if options.is_compiled else ""
    remedy = ""
    if not options.is_compiled and options.quantization in _ENGINE_QUANTIZATIONS:
        remedy = f"; compiled engines have it (--compile, TensorRT-LLM {LAST_WITH_ENGINES})"
    elif options.quantization in ("int8", "int4"):
        remedy = "; OpenVINO has it (--runtime openvino)"
    return f"{text}, got {options.quantization!r}{remedy}"


def _check_source(options: BuildOptions, source: SourceCheckpoint) -> None:
    if source.format is ModelFormat.OPENVINO_IR:
        raise UsageError(
            f"{source.path} is an OpenVINO IR, which TensorRT-LLM cannot run; build it with --runtime openvino"
        )
    is_huggingface = source.format is ModelFormat.HUGGINGFACE
    if options.quantization != "none" and (source.quantized_by or not is_huggingface):
        state = f"is quantised already (by {source.quantized_by})" if source.quantized_by else "is converted already"
        raise UsageError(
            f"--quantization {options.quantization}: {source.path} {state}; build from the original checkpoint, or "
            "leave --quantization out"
        )
    if options.is_compiled and source.format is ModelFormat.TENSORRT_LLM_ENGINE:
        raise UsageError(f"--compile: {source.path} holds compiled engines already; leave --compile out")


def _compile_steps(
    options: BuildOptions, source: SourceCheckpoint, target: Path, work: Path, library: Version
) -> Iterator[BuildStep]:
    checkpoint = source.path
    if source.format is ModelFormat.HUGGINGFACE:
        checkpoint = work / "tensorrt_llm_checkpoint"
        examples = options.tensorrt_llm_examples or next(filter(Path.is_dir, _EXAMPLES), _EXAMPLES[-1])
        if options.quantization == "none" and options.kv_cache_dtype == "auto" and _converter(options, source):
            yield _convert_step(options, source, checkpoint, examples, library)
        else:
            yield _quantize_step(options, source, checkpoint, examples, library)
    yield _engine_step(options, checkpoint, target, source, library)


def _converter(options: BuildOptions, source: SourceCheckpoint) -> str | None:
    """Return the folder of the script that can convert this model, None where there is none."""
    folder, has_stages = _CONVERTERS.get(source.model_type, (None, False))
    return folder if has_stages or options.pipeline_parallel_size == 1 else None


def _convert_step(
    options: BuildOptions, source: SourceCheckpoint, target: Path, examples: Path, library: Version
) -> ToolStep:
    script = str(examples / "models" / "core" / str(_converter(options, source)) / "convert_checkpoint.py")
    argv = [PYTHON, script, "--model_dir", str(source.path), "--output_dir", str(target)]
    argv += ["--dtype", options.dtype.value, *_parallelism_flags(options)]
    return ToolStep(
        "convert the checkpoint for TensorRT-LLM's compiler",
        tuple(argv),
        script,
        _clone_command(library),
        _size(source),
        needs_gpu=False,
    )


def _quantize_step(
    options: BuildOptions, source: SourceCheckpoint, target: Path, examples: Path, library: Version
) -> ToolStep:
    script = str(examples / "quantization" / "quantize.py")
    is_plain = options.quantization == "none"
    argv = [PYTHON, script, "--model_dir", str(source.path), "--output_dir", str(target)]
    argv += ["--dtype", options.dtype.value, "--qformat", "full_prec" if is_plain else options.quantization]
    if options.kv_cache_dtype != "auto":
        argv += ["--kv_cache_dtype", options.kv_cache_dtype]
    argv += _parallelism_flags(options)
    if not is_plain or options.kv_cache_dtype != "auto":
        argv += ["--calib_size", str(options.calib_size)]
        argv += ["--calib_dataset", options.calib_dataset] if options.calib_dataset else []
    action = "convert the checkpoint" if is_plain else f"quantise the checkpoint to {options.quantization}"
    purpose = f"{action} for TensorRT-LLM's compiler"
    return ToolStep(purpose, tuple(argv), script, _clone_command(library), _size(source))


def _engine_step(
    options: BuildOptions, checkpoint: Path, target: Path, source: SourceCheckpoint, library: Version
) -> ToolStep:
    """Compile the engines.

    The compiler takes the longest context from the checkpoint, but without --max_input_len it limits prompts to 1024
    tokens.
    """
    argv = ["trtllm-build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(target), "--gemm_plugin", "auto"]
    argv += ["--use_paged_context_fmha", "enable", "--max_beam_width", str(options.max_beam_width)]
    for flag, value in (
        ("--max_batch_size", options.max_num_seqs),
        ("--max_num_tokens", options.max_num_batched_tokens),
        ("--max_seq_len", options.max_model_len),
        ("--max_input_len", options.max_model_len or source.config.get("max_position_embeddings")),
        ("--workers", options.num_gpus if options.num_gpus > 1 else None),
    ):
        argv += [flag, str(value)] if value is not None else []
    install = f"pip install tensorrt-llm=={library}"
    return ToolStep("compile the engines", tuple(argv), "trtllm-build", install, _size(source))


def _modelopt_step(options: BuildOptions, source: SourceCheckpoint, target: Path) -> ToolStep:
    """Quantize by ModelOpt, which also quantizes the KV cache unless the format `none` is given."""
    release = Version(_installed("nvidia-modelopt") or _MODELOPT)
    folder = "hf_ptq" if release >= _MODELOPT_RENAMED else "llm_ptq"
    script = str((options.modelopt_examples or Path("Model-Optimizer/examples")) / folder / "hf_ptq.py")
    qformat = options.quantization
    if qformat == "w4a8_awq" and release >= _MODELOPT_RENAMED:
        qformat = "w4a8_awq_beta"
    argv = [PYTHON, script, "--pyt_ckpt_path", str(source.path), "--export_path", str(target), "--qformat", qformat]
    argv += ["--kv_cache_qformat", "fp8" if options.kv_cache_dtype == "fp8" else "none"]
    argv += ["--inference_tensor_parallel", str(options.tensor_parallel_size), "--calib_size", str(options.calib_size)]
    argv += ["--dataset", options.calib_dataset] if options.calib_dataset else []
    clone = f"git clone --depth 1 --branch {release} https://github.com/NVIDIA/Model-Optimizer"
    return ToolStep(f"quantise the checkpoint to {options.quantization}", tuple(argv), script, clone, _size(source))


def _parallelism_flags(options: BuildOptions) -> list[str]:
    return ["--tp_size", str(options.tensor_parallel_size), "--pp_size", str(options.pipeline_parallel_size)]


def _clone_command(library: Version) -> str:
    return f"git clone --depth 1 --branch v{library} https://github.com/NVIDIA/TensorRT-LLM"


def _size(source: SourceCheckpoint) -> int:
    """Return an upper bound of what a step writes: the size of the weights it reads."""
    return size_of(model_files(source.path, source.format)) if source.path.is_dir() else 0


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _parameters(options: BuildOptions, built: ModelFormat) -> dict[str, str]:
    return {"dtype": "" if options.dtype is Dtype.AUTO else options.dtype.value}


def _is_required(options: BuildOptions) -> bool:
    return options.is_compiled or options.num_gpus > 1 or options.quantization in _OWN_QUANTIZATIONS


def _manifest_version(options: BuildOptions) -> str | None:
    """Return the version that compiled the engines, or the installed one; None where there is neither."""
    return str(_library_version(options)) if options.is_compiled else _installed("tensorrt-llm")


TENSORRT_LLM_BUILDER = RuntimeBuilder(
    backend="tensorrtllm",
    check=_check_build,
    is_required=_is_required,
    built_format=_built_format,
    steps=_build_steps,
    parameters=_parameters,
    title=lambda options: f"TensorRT-LLM {_library_version(options)}",
    library_version=_manifest_version,
)
