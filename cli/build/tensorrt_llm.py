"""The commands that make what TensorRT-LLM serves: quantised checkpoints, and engines where it still has them."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import InvalidVersion, Version

from engine.model_folder import ModelFormat
from engine.delegated.tensorrt_llm.library import FIRST_WITHOUT_ENGINES, LAST_WITH_ENGINES, MINIMUM, is_before
from cli.build.arguments import Options
from cli.build.failures import AskedError
from cli.build.files import model_files, size_of
from cli.build.source import Checkpoint
from cli.build.steps import PYTHON, Copy, Step, Tool

NEWEST = "1.2.1"
"""Release that commands are for where none is installed."""
_MODELOPT = "0.37.0"
"""Release of ModelOpt that TensorRT-LLM 1.2 requires."""
_MODELOPT_RENAMED = Version("0.46")
"""First release with the scripts in hf_ptq."""

CHECKPOINT_QUANTIZATIONS = ("none", "fp8", "nvfp4", "int4_awq", "w4a8_awq")
ENGINE_QUANTIZATIONS = ("none", "fp8", "nvfp4", "int8_sq", "int4_awq", "w4a8_awq", "int8_wo", "int4_wo")
KV_CACHE_DTYPES = ("auto", "fp8")
ONLY_HERE = (*CHECKPOINT_QUANTIZATIONS[1:], *ENGINE_QUANTIZATIONS[1:])

_EXAMPLES = (Path("/app/tensorrt_llm/examples"), Path("TensorRT-LLM/examples"))
"""In NVIDIA's images; else in a clone of the sources."""
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
"""By model_type: the folder of its convert_checkpoint.py, and whether that can split into pipeline stages. They run
without a GPU; models of other types go through quantize.py, which leaves the precision alone where it is told so."""


def library_version(options: Options) -> Version:
    """Which TensorRT-LLM the commands are for. Raises AskedError for one that they do not fit."""
    text = options.tensorrt_llm_version or installed_version() or NEWEST
    try:
        found = Version(text)
    except InvalidVersion:
        raise AskedError(f"--tensorrt-llm-version must be a version such as {NEWEST}, got {text!r}") from None
    if is_before(found, str(MINIMUM)):
        raise AskedError(f"TensorRT-LLM {text} is older than {MINIMUM}, the first that Sluice serves by; update it")
    if options.is_compiled and not is_before(found, FIRST_WITHOUT_ENGINES):
        raise AskedError(
            f"--compile: compiled engines ended with TensorRT-LLM {LAST_WITH_ENGINES}, and this is {text}. Leave "
            "--compile out: the checkpoint itself is served. Or use an older one (--tensorrt-llm-version "
            f"{NEWEST} --dry-run shows its commands)"
        )
    return found


def installed_version() -> str | None:
    return _installed("tensorrt-llm")


def check(options: Options, source: Checkpoint | None) -> None:
    """Raises AskedError for what TensorRT-LLM, or the checkpoint, cannot do. `source` None: not there yet."""
    known = ENGINE_QUANTIZATIONS if options.is_compiled else CHECKPOINT_QUANTIZATIONS
    if options.quantization not in known:
        raise AskedError(_unknown_quantization(options, known))
    if options.kv_cache_dtype not in KV_CACHE_DTYPES:
        allowed = " or ".join(KV_CACHE_DTYPES)
        raise AskedError(f"--kv-cache-dtype must be {allowed} for tensorrt_llm, got {options.kv_cache_dtype!r}")
    if source is not None:
        _check_source(options, source)


def format_of(options: Options, source: Checkpoint | None) -> ModelFormat:
    """What the version's folder will hold."""
    if options.is_compiled:
        return ModelFormat.TENSORRT_LLM_ENGINE
    return ModelFormat.HUGGINGFACE if source is None else source.format


def steps(options: Options, source: Checkpoint, target: Path, work: Path) -> Iterator[Step]:
    """From the checkpoint to the version's folder `target`. Raises AskedError as `library_version`."""
    library = library_version(options)
    if options.is_compiled:
        yield from _compiled(options, source, target, work, library)
    elif options.quantization == "none":
        yield Copy("put the checkpoint in its place", source.path, target, source.format, options.is_linked)
    else:
        yield _ptq(options, source, target)


def _unknown_quantization(options: Options, known: tuple[str, ...]) -> str:
    text = f"--quantization must be one of {', '.join(known)} for tensorrt_llm"
    text += " with --compile" if options.is_compiled else ""
    remedy = ""
    if not options.is_compiled and options.quantization in ENGINE_QUANTIZATIONS:
        remedy = f"; compiled engines have it (--compile, TensorRT-LLM {LAST_WITH_ENGINES})"
    elif options.quantization in ("int8", "int4"):
        remedy = "; OpenVINO has it (--runtime openvino)"
    return f"{text}, got {options.quantization!r}{remedy}"


def _check_source(options: Options, source: Checkpoint) -> None:
    if source.format is ModelFormat.OPENVINO_IR:
        raise AskedError(
            f"{source.path} is an OpenVINO IR, which TensorRT-LLM cannot run; build it with --runtime openvino"
        )
    is_huggingface = source.format is ModelFormat.HUGGINGFACE
    if options.quantization != "none" and (source.quantized_by or not is_huggingface):
        what = f"is quantised already (by {source.quantized_by})" if source.quantized_by else "is converted already"
        raise AskedError(
            f"--quantization {options.quantization}: {source.path} {what}; build from the original checkpoint, or "
            "leave --quantization out"
        )
    if options.is_compiled and source.format is ModelFormat.TENSORRT_LLM_ENGINE:
        raise AskedError(f"--compile: {source.path} holds compiled engines already; leave --compile out")


def _compiled(options: Options, source: Checkpoint, target: Path, work: Path, library: Version) -> Iterator[Step]:
    checkpoint = source.path
    if source.format is ModelFormat.HUGGINGFACE:
        checkpoint = work / "tensorrt_llm_checkpoint"
        examples = options.tensorrt_llm_examples or next(filter(Path.is_dir, _EXAMPLES), _EXAMPLES[-1])
        if options.quantization == "none" and options.kv_cache_dtype == "auto" and _converter(options, source):
            yield _convert(options, source, checkpoint, examples, library)
        else:
            yield _quantize(options, source, checkpoint, examples, library)
    yield _engines(options, checkpoint, target, source, library)


def _converter(options: Options, source: Checkpoint) -> str | None:
    """The folder of the script that converts this model, where there is one that can."""
    folder, has_stages = _CONVERTERS.get(source.model_type, (None, False))
    return folder if has_stages or options.pipeline_parallel_size == 1 else None


def _convert(options: Options, source: Checkpoint, target: Path, examples: Path, library: Version) -> Tool:
    script = str(examples / "models" / "core" / str(_converter(options, source)) / "convert_checkpoint.py")
    argv = [PYTHON, script, "--model_dir", str(source.path), "--output_dir", str(target)]
    argv += ["--dtype", options.dtype.value, *_split(options)]
    return Tool(
        "convert the checkpoint for TensorRT-LLM's compiler",
        tuple(argv),
        script,
        _clone_of_tensorrt_llm(library),
        _size(source),
        wants_gpu=False,
    )


def _quantize(options: Options, source: Checkpoint, target: Path, examples: Path, library: Version) -> Tool:
    script = str(examples / "quantization" / "quantize.py")
    is_plain = options.quantization == "none"
    argv = [PYTHON, script, "--model_dir", str(source.path), "--output_dir", str(target)]
    argv += ["--dtype", options.dtype.value, "--qformat", "full_prec" if is_plain else options.quantization]
    if options.kv_cache_dtype != "auto":
        argv += ["--kv_cache_dtype", options.kv_cache_dtype]
    argv += _split(options)
    if not is_plain or options.kv_cache_dtype != "auto":
        argv += ["--calib_size", str(options.calib_size)]
        argv += ["--calib_dataset", options.calib_dataset] if options.calib_dataset else []
    what = "convert the checkpoint" if is_plain else f"quantise the checkpoint to {options.quantization}"
    purpose = f"{what} for TensorRT-LLM's compiler"
    return Tool(purpose, tuple(argv), script, _clone_of_tensorrt_llm(library), _size(source))


def _engines(options: Options, checkpoint: Path, target: Path, source: Checkpoint, library: Version) -> Tool:
    """The compiler takes the longest context from the checkpoint, but prompts of 1024 tokens unless it is told more."""
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
    return Tool("compile the engines", tuple(argv), "trtllm-build", install, _size(source))


def _ptq(options: Options, source: Checkpoint, target: Path) -> Tool:
    """ModelOpt quantises the KV cache too unless it is told not to."""
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
    return Tool(f"quantise the checkpoint to {options.quantization}", tuple(argv), script, clone, _size(source))


def _split(options: Options) -> list[str]:
    return ["--tp_size", str(options.tensor_parallel_size), "--pp_size", str(options.pipeline_parallel_size)]


def _clone_of_tensorrt_llm(library: Version) -> str:
    return f"git clone --depth 1 --branch v{library} https://github.com/NVIDIA/TensorRT-LLM"


def _size(source: Checkpoint) -> int:
    """At most: nothing that is made of weights is larger than they."""
    return size_of(model_files(source.path, source.format)) if source.path.is_dir() else 0


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
