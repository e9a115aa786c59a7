"""Checks of one model on one machine: its files, its types, its fit into memory. Pure: from facts to findings."""

from collections.abc import Iterator
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from sluice.cli.doctor.facts import MachineFacts, ModelFacts, ModelSize
from sluice.cli.doctor.findings import DoctorFinding, fail, note, ok, warn
from sluice.cli.doctor.models import cache_width
from sluice.cli.gpus import ComputeCapability, GpuFacts
from sluice.cli.terminal import format_size
from sluice.engine.delegated.tensorrt_llm.library import FIRST_WITHOUT_ENGINES, is_before
from sluice.engine.model_folder import ModelFormat
from sluice.engine.runtime_spec import RuntimeSpec
from sluice.engine.runtimes import RuntimeChoice, runtimes_for
from sluice.errors import SluiceError

NEEDED_CAPABILITY = {
    "nvfp4": ComputeCapability(10, 0),
    "fp8": ComputeCapability(8, 9),
    "fp8_e4m3": ComputeCapability(8, 9),
    "fp8_block_scales": ComputeCapability(8, 9),
    "fp8_pb_wo": ComputeCapability(8, 9),
    "w4a8_awq": ComputeCapability(8, 9),
    "mxfp4": ComputeCapability(9, 0),
}
"""Oldest compute capability for each precision (TensorRT-LLM's table of precisions by architecture)."""
RUNTIME_BYTES = 2 << 30
"""Memory of each GPU for CUDA's context, libraries, workspaces and activations. An estimate."""
CACHE_FRACTION = 0.9
"""Share of the memory left after loading that TensorRT-LLM gives the KV cache by default."""
_WEIGHT_SHARE = {"int8": 0.52, "int4": 0.3}
"""Size of compressed weights over that of bf16 weights, scales included."""


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """The options with which the model is to be served."""

    num_gpus: int = 1
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    device: str = "auto"


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Memory a model needs, and what is left for its KV cache.

    `left_bytes` is negative where the weights alone do not fit. `num_tokens` is what the cache could hold, None where
    config.json does not give the model's shape.
    """

    needed_bytes: int
    left_bytes: int
    num_tokens: int | None


def check_model(
    model: ModelFacts, machine: MachineFacts, choice: RuntimeChoice | SluiceError, options: ServingOptions
) -> Iterator[DoctorFinding]:
    """Check the model. `choice` is the runtime that would serve it, or the reason why none would."""
    weights = format_size(model.size.weight_bytes)
    what = f"{model.format.value.replace('_', ' ')}, {model.architecture}, {model.dtype or 'dtype unknown'}, "
    yield ok(model.name, f"{what}quantization {model.quantization}, weights of {weights}")
    if isinstance(choice, SluiceError):
        yield fail(model.name, choice.message, "see above")
        return
    yield from _check_tokenizer(model)
    yield from _check_versions(model, machine)
    yield from _check_types(model, choice.spec, options)
    problem = model.problems.get(choice.runtime)
    if problem:
        others = [f"{spec.title} on {spec.devices}" for spec in runtimes_for(model.format) if spec is not choice.spec]
        yield fail(model.name, problem, f"serve it by {' or '.join(others)}, or another model")
        return
    yield ok(model.name, f"runs on {choice.spec.title}: {choice.reason}")
    takes_gpu = "cuda" in choice.spec.device_names and options.device != "cpu" and bool(machine.driver.gpus)
    check_fit = _check_on_gpus if choice.spec.min_capability or takes_gpu else _check_on_host
    yield from check_fit(model, machine, options)


def _check_tokenizer(model: ModelFacts) -> Iterator[DoctorFinding]:
    if not model.has_tokenizer:
        where = "`sluice serve --tokenizer`; tokenizer_dir in config.pbtxt"
        remedy = f"put tokenizer.json and tokenizer_config.json of the model there, or name their folder ({where})"
        yield fail(model.name, f"{model.path} has no tokenizer", remedy)
    built = model.manifest.get("tokenizer_sha256")
    if built and model.tokenizer_sha256 and built != model.tokenizer_sha256:
        yield warn(
            model.name,
            "tokenizer.json is not the one that it was built with: token ids may mean other words",
            "build it again, or put the old file back",
        )


def _check_types(model: ModelFacts, spec: RuntimeSpec, options: ServingOptions) -> Iterator[DoctorFinding]:
    """Check the requested quantization and KV cache type against those that the runtime has."""
    if options.kv_cache_dtype not in spec.kv_cache_dtypes:
        text = f"{spec.title} has no KV cache of {options.kv_cache_dtype}"
        yield fail(model.name, text, f"give --kv-cache-dtype one of {', '.join(spec.kv_cache_dtypes)}")
    if options.quantization in ("none", model.quantization):
        return
    if spec.compresses_weights and options.quantization not in spec.quantizations:
        text = f"{spec.title} does not compress weights to {options.quantization}"
        yield fail(model.name, text, f"give --quantization one of none, {', '.join(spec.quantizations)}")
    elif not spec.compresses_weights and model.quantization == "none":
        text = f"{spec.title} runs weights as they are, and these are not compressed to {options.quantization}"
        yield fail(model.name, text, "make a checkpoint that is (`sluice build --quantization`), or leave it out")


def _check_versions(model: ModelFacts, machine: MachineFacts) -> Iterator[DoctorFinding]:
    installed = machine.libraries.versions
    written_by, installed_here = model.transformers_version, installed.get("transformers", "")
    if _is_newer(written_by, installed_here):
        yield note(
            model.name,
            f"config.json was written by transformers {written_by}, {installed_here} is installed",
            "where it does not load, install the newer one",
        )
    built = model.manifest.get("sluice_version")
    if built and built != installed.get("sluice"):
        yield note(
            model.name, f"built by Sluice {built}, {installed.get('sluice')} is here", "build it again if it fails"
        )


def _is_newer(version: str, other: str) -> bool:
    try:
        return Version(version).major > Version(other).major
    except InvalidVersion:
        return False


def _check_on_gpus(model: ModelFacts, machine: MachineFacts, options: ServingOptions) -> Iterator[DoctorFinding]:
    if model.format is ModelFormat.TENSORRT_LLM_ENGINE:
        yield from _check_engine(model, machine)
    gpus, num_gpus = machine.driver.gpus, max(model.num_gpus, options.num_gpus)
    if not gpus:
        return  # check_machine reports it
    if num_gpus > len(gpus):
        remedy = f"give --tensor-parallel-size {len(gpus)} or less, or several nodes (--engine-launcher)"
        yield fail(model.name, f"it is to run on {num_gpus} GPUs, and this machine has {len(gpus)}", remedy)
        return
    used = gpus[:num_gpus]
    if len({gpu.name for gpu in used}) > 1:
        text = f"its GPUs differ ({', '.join(gpu.name for gpu in used)}): the slowest and smallest sets the pace"
        yield warn(model.name, text, "choose equal ones by CUDA_VISIBLE_DEVICES")
    yield from _check_capability(model, used, options)
    yield from _check_gpu_memory(model, used, options)


def _check_engine(model: ModelFacts, machine: MachineFacts) -> Iterator[DoctorFinding]:
    installed = machine.libraries.versions.get("tensorrt-llm")
    if installed is not None and not is_before(Version(installed), FIRST_WITHOUT_ENGINES):
        yield fail(
            model.name,
            f"it is a compiled engine, and TensorRT-LLM {installed} runs none any more",
            "serve the HuggingFace checkpoint that it was made of, or install tensorrt-llm<1.3",
        )
    elif installed is not None and model.built_by and model.built_by != installed:
        yield fail(
            model.name,
            f"the engine was compiled by TensorRT-LLM {model.built_by}, {installed} is installed: it runs no other's",
            f"compile it again (`sluice build`), or install tensorrt-llm=={model.built_by}",
        )
    gpus = machine.driver.gpus
    if model.built_for is not None and gpus and gpus[0].capability not in (None, model.built_for):
        yield fail(
            model.name,
            f"the engine was compiled on compute capability {model.built_for}, GPU 0 has {gpus[0].capability}",
            "compile it again on this machine (`sluice build`)",
        )


def _check_capability(
    model: ModelFacts, gpus: tuple[GpuFacts, ...], options: ServingOptions
) -> Iterator[DoctorFinding]:
    for precision in dict.fromkeys((model.quantization, options.quantization, options.kv_cache_dtype)):
        needed = NEEDED_CAPABILITY.get(precision)
        lacking = [gpu for gpu in gpus if needed and gpu.capability is not None and gpu.capability < needed]
        if lacking:
            text = f"{precision} needs compute capability {needed}, GPU {lacking[0].index} has {lacking[0].capability}"
            yield fail(model.name, text, "take a checkpoint in bf16, int8 or int4, or a newer GPU")


def _check_gpu_memory(
    model: ModelFacts, gpus: tuple[GpuFacts, ...], options: ServingOptions
) -> Iterator[DoctorFinding]:
    free = min(gpu.memory_free_bytes for gpu in gpus)
    width = cache_width(options.kv_cache_dtype, model.dtype)
    fit = _fit_gpus(model.size, free, len(gpus), width)
    usage = f"about {format_size(fit.needed_bytes)} of each GPU's {format_size(free)} for weights and runtime"
    remedy = "more GPUs (--tensor-parallel-size), a compressed checkpoint (fp8, int4), or free what others hold"
    yield from _check_fit(model, fit, usage, remedy, options)


def _check_on_host(model: ModelFacts, machine: MachineFacts, options: ServingOptions) -> Iterator[DoctorFinding]:
    width = cache_width(options.kv_cache_dtype, model.dtype)
    is_compressed = model.quantization == options.quantization
    quantization = "none" if is_compressed else options.quantization
    fit = _fit_host(model.size, machine.memory_available_bytes, quantization, width)
    available = format_size(machine.memory_available_bytes)
    usage = f"about {format_size(fit.needed_bytes)} of {available} of memory for weights"
    remedy = "compress it (--quantization int8), take a smaller model, or a machine with more memory"
    yield from _check_fit(model, fit, usage, remedy, options)


def _check_fit(
    model: ModelFacts, fit: MemoryFit, usage: str, remedy: str, options: ServingOptions
) -> Iterator[DoctorFinding]:
    longest = options.max_model_len or model.size.max_model_len
    if fit.left_bytes <= 0:
        yield fail(model.name, f"{usage}: it does not fit", remedy)
    elif fit.num_tokens is None or longest is None:
        yield ok(model.name, f"{usage}; {format_size(fit.left_bytes)} are left for the KV cache")
    elif fit.num_tokens < longest:
        text = f"{usage}; what is left caches {fit.num_tokens} tokens, one request may have {longest}"
        yield warn(model.name, text, f"{remedy}; or lower --max-model-len")
    else:
        text = f"{usage}; what is left could cache {fit.num_tokens} tokens, {fit.num_tokens // longest} requests of"
        yield ok(model.name, f"{text} {longest}")


def _fit_gpus(size: ModelSize, free_bytes: int, num_gpus: int, cache_width: float) -> MemoryFit:
    """Fit the model on GPUs that share weights and cache evenly. `free_bytes` is the least that any has free."""
    needed = size.weight_bytes // num_gpus + RUNTIME_BYTES
    left = free_bytes - needed
    return MemoryFit(needed, left, _cache_tokens(size, int(left * CACHE_FRACTION) * num_gpus, cache_width))


def _fit_host(size: ModelSize, available_bytes: int, quantization: str, cache_width: float) -> MemoryFit:
    """Fit the model in the host's memory. Weights are mapped from their files; they count, as paging is slow."""
    needed = int(size.weight_bytes * _WEIGHT_SHARE.get(quantization, 1.0))
    left = available_bytes - needed
    return MemoryFit(needed, left, _cache_tokens(size, left, cache_width))


def _cache_tokens(size: ModelSize, cache_bytes: int, cache_width: float) -> int | None:
    if not size.kv_bytes_per_token:
        return None
    return max(int(cache_bytes / (size.kv_bytes_per_token * cache_width)), 0)
