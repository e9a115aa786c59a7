"""What is to be said of one model on one machine. Pure: from facts to findings."""

from collections.abc import Iterator
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from cli.doctor.facts import Capability, Gpu, Machine, ModelFacts
from cli.doctor.findings import Finding, fail, note, ok, warn
from cli.doctor.models import cache_width
from cli.doctor.sizing import DEFAULT_FRACTION, Fit, fit_gpus, fit_host
from cli.doctor.units import gib
from engine.config import Runtime
from engine.delegated.tensorrt_llm.versions import FIRST_WITHOUT_ENGINES, is_before
from engine.model_folder import ModelFormat
from engine.runners.openvino.weights.compression import QUANTIZATIONS
from engine.runtimes import RuntimeChoice
from sluice.errors import SluiceError

NEEDED_CAPABILITY = {
    "nvfp4": Capability(10, 0),
    "fp8": Capability(8, 9),
    "fp8_e4m3": Capability(8, 9),
    "fp8_block_scales": Capability(8, 9),
    "fp8_pb_wo": Capability(8, 9),
    "w4a8_awq": Capability(8, 9),
    "mxfp4": Capability(9, 0),
}
"""By what the weights are compressed to (TensorRT-LLM's table of precisions by architecture)."""


CACHE_TYPES = {
    Runtime.OPENVINO: ("auto", "bf16", "f32", "u8"),
    Runtime.TENSORRT_LLM: ("auto", "fp8", "nvfp4"),
}
RUNTIME_NAMES = {Runtime.OPENVINO: "OpenVINO", Runtime.TENSORRT_LLM: "TensorRT-LLM"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """How the model is to be served."""

    num_gpus: int = 1
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    cache_fraction: float = DEFAULT_FRACTION


def check_model(
    model: ModelFacts, machine: Machine, choice: RuntimeChoice | SluiceError, wanted: Wanted
) -> Iterator[Finding]:
    """`choice` is the runtime that would serve it, or why there is none."""
    weights = gib(model.size.weight_bytes)
    what = f"{model.format.value.replace('_', ' ')}, {model.architecture}, {model.dtype or 'dtype unknown'}, "
    yield ok(model.name, f"{what}quantization {model.quantization}, weights of {weights}")
    if isinstance(choice, SluiceError):
        yield fail(model.name, choice.message, "see above")
        return
    yield from _check_tokenizer(model)
    yield from _check_versions(model, machine)
    yield from _check_types(model, choice.runtime, wanted)
    if choice.runtime is Runtime.TENSORRT_LLM:
        yield ok(model.name, f"runs on TensorRT-LLM: {choice.reason}")
        yield from _check_on_gpus(model, machine, wanted)
    elif model.openvino_problem:
        yield fail(model.name, model.openvino_problem, "serve it by TensorRT-LLM on an NVIDIA GPU, or another model")
    else:
        yield ok(model.name, f"runs on OpenVINO: {choice.reason}")
        yield from _check_on_host(model, machine, wanted)


def _check_tokenizer(model: ModelFacts) -> Iterator[Finding]:
    if not model.has_tokenizer:
        where = "`sluice serve --tokenizer`; tokenizer_dir in config.pbtxt"
        remedy = f"put tokenizer.json and tokenizer_config.json of the model there, or name their folder ({where})"
        yield fail(model.name, f"{model.path} has no tokenizer", remedy)
    built = model.notes.get("tokenizer_sha256")
    if built and model.tokenizer_sha256 and built != model.tokenizer_sha256:
        yield warn(
            model.name,
            "tokenizer.json is not the one that it was built with: token ids may mean other words",
            "build it again, or put the old file back",
        )


def _check_types(model: ModelFacts, runtime: Runtime, wanted: Wanted) -> Iterator[Finding]:
    """What is asked for beside the model's own."""
    cache_types, name = CACHE_TYPES[runtime], RUNTIME_NAMES[runtime]
    if wanted.kv_cache_dtype not in cache_types:
        text = f"{name} has no KV cache of {wanted.kv_cache_dtype}"
        yield fail(model.name, text, f"give --kv-cache-dtype one of {', '.join(cache_types)}")
    is_asked = wanted.quantization not in ("none", model.quantization)
    if is_asked and runtime is Runtime.OPENVINO and wanted.quantization not in QUANTIZATIONS:
        text = f"OpenVINO does not compress weights to {wanted.quantization}"
        yield fail(model.name, text, f"give --quantization one of none, {', '.join(QUANTIZATIONS)}")
    elif is_asked and runtime is Runtime.TENSORRT_LLM and model.quantization == "none":
        text = f"TensorRT-LLM runs weights as they are, and these are not compressed to {wanted.quantization}"
        yield fail(model.name, text, "make a checkpoint that is (`sluice build --quantization`), or leave it out")


def _check_versions(model: ModelFacts, machine: Machine) -> Iterator[Finding]:
    installed = machine.libraries.versions
    wrote, here = model.transformers_version, installed.get("transformers", "")
    if _is_newer(wrote, here):
        yield note(
            model.name,
            f"config.json was written by transformers {wrote}, {here} is installed",
            "where it does not load, install the newer one",
        )
    built = model.notes.get("sluice_version")
    if built and built != installed.get("sluice"):
        yield note(
            model.name, f"built by Sluice {built}, {installed.get('sluice')} is here", "build it again if it fails"
        )


def _is_newer(wrote: str, here: str) -> bool:
    try:
        return Version(wrote).major > Version(here).major
    except InvalidVersion:
        return False


# -- on GPUs


def _check_on_gpus(model: ModelFacts, machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    if model.format is ModelFormat.TENSORRT_LLM_ENGINE:
        yield from _check_engine(model, machine)
    gpus, num_gpus = machine.gpus.gpus, max(model.num_gpus, wanted.num_gpus)
    if not gpus:
        return  # the machine's own findings say so
    if num_gpus > len(gpus):
        remedy = f"give --tensor-parallel-size {len(gpus)} or less, or several nodes (--engine-launcher)"
        yield fail(model.name, f"it is to run on {num_gpus} GPUs, and this machine has {len(gpus)}", remedy)
        return
    used = gpus[:num_gpus]
    if len({gpu.name for gpu in used}) > 1:
        text = f"its GPUs differ ({', '.join(gpu.name for gpu in used)}): the slowest and smallest sets the pace"
        yield warn(model.name, text, "choose equal ones by CUDA_VISIBLE_DEVICES")
    yield from _check_capability(model, used, wanted)
    yield from _check_gpu_memory(model, used, wanted)


def _check_engine(model: ModelFacts, machine: Machine) -> Iterator[Finding]:
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
    gpus = machine.gpus.gpus
    if model.built_for is not None and gpus and gpus[0].capability not in (None, model.built_for):
        yield fail(
            model.name,
            f"the engine was compiled on compute capability {model.built_for}, GPU 0 has {gpus[0].capability}",
            "compile it again on this machine (`sluice build`)",
        )


def _check_capability(model: ModelFacts, gpus: tuple[Gpu, ...], wanted: Wanted) -> Iterator[Finding]:
    for words in dict.fromkeys((model.quantization, wanted.quantization, wanted.kv_cache_dtype)):
        needed = NEEDED_CAPABILITY.get(words)
        lacking = [gpu for gpu in gpus if needed and gpu.capability is not None and gpu.capability < needed]
        if lacking:
            text = f"{words} needs compute capability {needed}, GPU {lacking[0].index} has {lacking[0].capability}"
            yield fail(model.name, text, "take a checkpoint in bf16, int8 or int4, or a newer GPU")


def _check_gpu_memory(model: ModelFacts, gpus: tuple[Gpu, ...], wanted: Wanted) -> Iterator[Finding]:
    free = min(gpu.memory_free_bytes for gpu in gpus)
    width = cache_width(wanted.kv_cache_dtype, model.dtype)
    fit = fit_gpus(model.size, free, len(gpus), width, wanted.cache_fraction)
    each = f"about {gib(fit.needed_bytes)} of each GPU's {gib(free)} for weights and runtime"
    remedy = "more GPUs (--tensor-parallel-size), a compressed checkpoint (fp8, int4), or free what others hold"
    yield from _check_fit(model, fit, each, remedy, wanted)


# -- on the host


def _check_on_host(model: ModelFacts, machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    width = cache_width(wanted.kv_cache_dtype, model.dtype)
    is_compressed = model.quantization == wanted.quantization
    fit = fit_host(model.size, machine.memory_available_bytes, "none" if is_compressed else wanted.quantization, width)
    each = f"about {gib(fit.needed_bytes)} of {gib(machine.memory_available_bytes)} of memory for weights"
    remedy = "compress it (--quantization int8), take a smaller model, or a machine with more memory"
    yield from _check_fit(model, fit, each, remedy, wanted)


def _check_fit(model: ModelFacts, fit: Fit, each: str, remedy: str, wanted: Wanted) -> Iterator[Finding]:
    longest = wanted.max_model_len or model.size.max_model_len
    if fit.left_bytes <= 0:
        yield fail(model.name, f"{each}: it does not fit", remedy)
    elif fit.num_tokens is None or longest is None:
        yield ok(model.name, f"{each}; {gib(fit.left_bytes)} are left for the KV cache")
    elif fit.num_tokens < longest:
        text = f"{each}; what is left caches {fit.num_tokens} tokens, one request may have {longest}"
        yield warn(model.name, text, f"{remedy}; or lower --max-model-len")
    else:
        text = f"{each}; what is left could cache {fit.num_tokens} tokens, {fit.num_tokens // longest} requests of"
        yield ok(model.name, f"{text} {longest}")
