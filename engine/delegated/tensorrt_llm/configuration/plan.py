"""From an EngineConfig to the arguments of TensorRT-LLM's LLM class."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.delegated.tensorrt_llm.configuration.adapters import resolve_adapters
from engine.delegated.tensorrt_llm.configuration.arguments import (
    ArgumentSet,
    Precedence,
    Resolution,
    add_fields,
    flattened,
)
from engine.delegated.tensorrt_llm.configuration.catalogue import SETTINGS
from engine.delegated.tensorrt_llm.configuration.limits import DEFAULTED, resolve_limits
from engine.delegated.tensorrt_llm.configuration.speculation import (
    SPECULATION,
    add_speculation_fields,
    resolve_speculation,
)
from engine.delegated.tensorrt_llm.configuration.sub_configs import (
    SUB_CONFIGS,
    as_python,
    build_arguments,
    check_versions,
)
from engine.delegated.tensorrt_llm.folder import LlmFolder
from engine.delegated.tensorrt_llm.grammars import LLGUIDANCE, XGRAMMAR
from engine.delegated.tensorrt_llm.library import TensorRtLlmLibrary, is_before
from engine.delegated.tensorrt_llm.runtime import TENSORRT_LLM
from engine.model_folder import ModelFormat
from engine.sampling_fields import OPTIONAL_FIELDS
from sluice.errors import invalid

IGNORED_BY_TORCH_SAMPLER = frozenset(
    {
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "bad_words",
        "no_repeat_ngram_size",
        "top_p_min",
        "top_p_decay",
        "top_p_reset_ids",
    }
)
"""Sampling parameters that TorchSampler takes and ignores before 1.3 (TensorRT-LLM's pulls 16052, 16485, 16594)."""

_FULL_SAMPLER = "TRTLLMSampler"
"""The sampler of 1.2 that acts on all parameters."""
_BACKEND = "backend"
_BATCHING = "batching_type"
_GUIDANCE = "guided_decoding_backend"
_KV_CACHE_FRACTION = 0.9
_STATISTICS = ("enable_iter_perf_stats", "return_perf_metrics")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
_DERIVED = frozenset({"model", "skip_tokenizer_init"})
"""Arguments that follow from the others."""
_ALGORITHMS = {"int8": "W8A16", "int4": "W4A16"}
"""TensorRT-LLM's names for our words of quantization; other words are its own names."""


@dataclass(frozen=True, slots=True)
class LlmPlan:
    """How the LLM is made: `llm_class(**arguments)`."""

    llm_class: Any
    arguments: dict[str, Any]
    """By keyword; sub-configurations are objects of the library's classes."""
    notes: tuple[str, ...]
    """Notes for the log on what was given and has no effect."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_beam_width: int
    tokens_per_block: int
    adapters: dict[str, str]
    """Folders of LoRA adapters by name, those of `lora_dir` included."""
    quantization: str = "none"
    ignored_sampling: frozenset[str] = frozenset()
    """Sampling parameters that this version's sampler would not act on: requests that have them are refused."""

    def __str__(self) -> str:
        """The plan in Python, without secrets: for the log and for `sluice build --dry-run`."""
        return as_python(getattr(self.llm_class, "__name__", str(self.llm_class)), self.arguments)

    @property
    def num_gpus(self) -> int:
        """Ranks of the model: one a GPU."""
        return math.prod(int(self.arguments.get(name) or 1) for name in _PARALLEL)

    @property
    def sampling_fields(self) -> tuple[str, ...]:
        """`EngineInfo.sampling_fields`."""
        return tuple(name for name in OPTIONAL_FIELDS if name not in self.ignored_sampling)


def plan_llm(config: EngineConfig, folder: LlmFolder, library: TensorRtLlmLibrary) -> LlmPlan:
    """Resolve every argument, and check it against the installed version first. Raises INVALID or UNIMPLEMENTED that
    names the setting, what it held and what is expected or which version has it."""
    settings = SETTINGS.check(config.runtime_settings)
    arguments = _gather(config)
    llm_class, is_engine = _choose_class(arguments, folder, library)
    resolution = Resolution(config, folder, library, arguments, is_engine)
    resolution.notes.extend((*TENSORRT_LLM.notes_on_ignored(config), *SETTINGS.notes(config.runtime_settings)))
    limits = resolve_limits(resolution)
    _resolve_batching(resolution)
    resolve_speculation(resolution)
    quantization = _resolve_quantization(resolution)
    adapters = resolve_adapters(resolution, settings.get("lora_dir", ()))
    _resolve_beam_search(resolution, limits.max_beam_width)
    _resolve_tokenizer(resolution)
    _add_defaults(resolution)
    check_versions(resolution)
    return LlmPlan(
        llm_class=llm_class,
        arguments={"model": str(folder.path), **build_arguments(arguments, library)},
        notes=tuple(resolution.notes),
        max_num_seqs=limits.max_batch_size,
        max_num_batched_tokens=limits.max_num_tokens,
        max_model_len=limits.max_seq_len,
        max_beam_width=limits.max_beam_width,
        tokens_per_block=limits.tokens_per_block,
        adapters=adapters,
        quantization=quantization,
        ignored_sampling=_ignored_sampling(resolution, limits.max_beam_width),
    )


def _gather(config: EngineConfig) -> ArgumentSet:
    """Gather all sources: EngineConfig's fields, the settings, and the raw arguments."""
    arguments = ArgumentSet()
    add_fields(arguments, config)
    for given in SETTINGS.parse(config.runtime_settings):
        if given.setting.target:
            arguments.add(given.setting.target, given.value, given.name)
    add_speculation_fields(arguments, config)
    for target, value in flattened(config.llm_arguments, SUB_CONFIGS).items():
        if target in _DERIVED:
            raise invalid("llm_arguments", f"llm_arguments must not have {target}: it follows from the model")
        if value is not None or target not in DEFAULTED:
            arguments.add(target, value, f"llm_arguments.{target}", Precedence.RAW)
    return arguments


def _choose_class(arguments: ArgumentSet, folder: LlmFolder, library: TensorRtLlmLibrary) -> tuple[Any, bool]:
    """Return the LLM class, and whether it is that of compiled engines."""
    is_converted = folder.format is not ModelFormat.HUGGINGFACE
    backend = arguments.get(_BACKEND)
    allowed = ("tensorrt",) if is_converted else ("pytorch", "tensorrt")
    if _BACKEND in arguments and backend not in allowed:
        what = folder.format.value.replace("_", " ")
        raise arguments.refusal(_BACKEND, f"must be {' or '.join(allowed)} for a {what}, got {backend!r}")
    arguments.drop(_BACKEND)
    if backend == "tensorrt" and not is_converted:
        return library.engine_class("a model with backend tensorrt"), True
    return library.llm_class(folder.format), is_converted


def _resolve_batching(resolution: Resolution) -> None:
    """The PyTorch backend batches in flight and has no argument for it."""
    arguments = resolution.arguments
    if not resolution.is_engine and arguments.get(_BATCHING) == "INFLIGHT":
        origin = arguments.origin(_BATCHING)
        resolution.notes.append(f"{origin} has no effect: the PyTorch backend always batches in flight")
        arguments.drop(_BATCHING)


def _resolve_quantization(resolution: Resolution) -> str:
    """Return how the weights are compressed, as `EngineInfo.quantization` has it. Raises INVALID where the checkpoint
    is not so and TensorRT-LLM would not make it so."""
    arguments, folder = resolution.arguments, resolution.folder
    word = resolution.config.quantization.lower()
    if word == "none":
        return str(arguments.get("quant_config.quant_algo", folder.quantization)).lower()
    algorithm = _ALGORITHMS.get(word, word.upper())
    if folder.quantization in (word, algorithm.lower()):
        resolution.notes.append(f"quantization {word} is what the checkpoint holds already")
        return folder.quantization
    known = resolution.library.arguments(is_engine=resolution.is_engine)
    if not (resolution.is_engine and folder.format is ModelFormat.HUGGINGFACE and "quant_config" in known):
        holds = "is not quantised" if folder.quantization == "none" else f"holds {folder.quantization}"
        raise invalid(
            "quantization",
            f"quantization {word} cannot be had from {folder.path}, which {holds}: TensorRT-LLM runs weights as they "
            f"are there. Make a quantised one with `sluice build --quantization {word}`, or leave quantization none",
        )
    arguments.add("quant_config.quant_algo", algorithm, "quantization")
    return algorithm.lower()


def _resolve_beam_search(resolution: Resolution, width: int) -> None:
    """1.2 searches with several beams only without the overlap scheduler and CUDA graphs."""
    arguments = resolution.arguments
    if resolution.is_engine or width == 1 or not is_before(resolution.library.version, "1.3"):
        return
    arguments.add_default("disable_overlap_scheduler", True, "max_beam_width")
    if not arguments.within("cuda_graph_config"):
        arguments.add_default("cuda_graph_config", None, "max_beam_width")
    without = "without the overlap scheduler and CUDA graphs before TensorRT-LLM 1.3"
    resolution.notes.append(f"max_beam_width above 1 runs {without}")


def _resolve_tokenizer(resolution: Resolution) -> None:
    """Only guided decoding needs a tokenizer in TensorRT-LLM: ids come in and go out."""
    arguments = resolution.arguments
    place = Path(arguments.get("tokenizer") or resolution.folder.path)
    has_fast_tokenizer = (place / _TOKENIZER_FILES[0]).is_file()
    if has_fast_tokenizer and not resolution.is_engine and not arguments.within(SPECULATION):
        arguments.add_default(_GUIDANCE, XGRAMMAR)
    if resolution.is_engine and arguments.get(_GUIDANCE) == LLGUIDANCE:
        reason = "must be xgrammar with a compiled engine; only the PyTorch backend has llguidance"
        raise arguments.refusal(_GUIDANCE, reason)
    if arguments.get(_GUIDANCE) is None:
        arguments.drop("tokenizer", _GUIDANCE)
        arguments.add_default("skip_tokenizer_init", True)
        return
    if not any((place / file).is_file() for file in _TOKENIZER_FILES):
        raise invalid(
            "tokenizer_path",
            f"guided decoding needs the model's tokenizer, but {place} has none of {', '.join(_TOKENIZER_FILES)}; give "
            "tokenizer_path, or the setting guided_decoding_backend=none",
        )
    arguments.add_default("tokenizer", str(place))


def _add_defaults(resolution: Resolution) -> None:
    """Add the adapter's own choices. Before 1.3 the library's choice of a sampler is one that ignores penalties."""
    arguments, library = resolution.arguments, resolution.library
    arguments.add_default("kv_cache_config.free_gpu_memory_fraction", _KV_CACHE_FRACTION)
    known = library.arguments(is_engine=resolution.is_engine)
    for name in _STATISTICS:
        if name in known:
            arguments.add_default(name, True)
    if _has_choice_of_sampler(resolution) and not arguments.within(SPECULATION):
        arguments.add_default("sampler_type", _FULL_SAMPLER)


def _ignored_sampling(resolution: Resolution, max_beam_width: int) -> frozenset[str]:
    """Return the sampling parameters that would have no effect. The choice "auto" acts on all only where there may be
    several beams; speculation has a sampler of its own, whatever is chosen."""
    if not _has_choice_of_sampler(resolution):
        return frozenset()
    sampler = resolution.arguments.get("sampler_type", "auto")
    acts_on_all = sampler == _FULL_SAMPLER or (sampler == "auto" and max_beam_width > 1)
    is_speculative = bool(resolution.arguments.within(SPECULATION))
    return frozenset() if acts_on_all and not is_speculative else IGNORED_BY_TORCH_SAMPLER


def _has_choice_of_sampler(resolution: Resolution) -> bool:
    return not resolution.is_engine and is_before(resolution.library.version, "1.3")
