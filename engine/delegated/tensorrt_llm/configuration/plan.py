"""From an EngineConfig to the arguments of TensorRT-LLM's LLM class."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from sluice.engine.config import EngineConfig
from sluice.engine.delegated.tensorrt_llm.adapters import resolve_adapters
from sluice.engine.delegated.tensorrt_llm.configuration.arguments import (
    ArgumentSet,
    Precedence,
    Resolution,
    add_fields,
    flattened,
)
from sluice.engine.delegated.tensorrt_llm.configuration.catalogue import CONFIGS, DECODING_TYPE, SETTINGS
from sluice.engine.delegated.tensorrt_llm.configuration.classes import as_python, build_arguments, check_arguments
from sluice.engine.delegated.tensorrt_llm.configuration.encoding import Encoder, resolve_encoder
from sluice.engine.delegated.tensorrt_llm.configuration.limits import DEFAULTED, RANKS, resolve_limits
from sluice.engine.delegated.tensorrt_llm.configuration.speculation import (
    SPECULATION,
    WITH_GRAMMARS,
    add_speculation_fields,
    resolve_speculation,
)
from sluice.engine.delegated.tensorrt_llm.disaggregation import resolve_transceiver
from sluice.engine.delegated.tensorrt_llm.folder import LlmFolder
from sluice.engine.delegated.tensorrt_llm.grammars import LLGUIDANCE, XGRAMMAR
from sluice.engine.delegated.tensorrt_llm.library import NEWEST, TensorRtLlmLibrary
from sluice.engine.delegated.tensorrt_llm.runtime import TENSORRT_LLM
from sluice.engine.delegated.tensorrt_llm.samplers import (
    ADVANCED_SAMPLING,
    BEAMS_SINCE,
    ENABLE_PENALTY,
    GATHER_CONTEXT,
    GATHER_GENERATION,
    PENALTIES_SINCE,
    ModelSampler,
    SamplerKind,
    is_one_model,
)
from sluice.engine.delegated.tensorrt_llm.sleeping import resolve_sleep
from sluice.engine.model_folder import ModelFormat
from sluice.engine.sampling_fields import OPTIONAL_FIELDS
from sluice.errors import invalid

_GUIDANCE = "guided_decoding_backend"
_EVENT_BUFFER = 65536
"""Events of the KV cache that wait to be fetched, some hundred bytes a token of prompts that were computed meanwhile:
what is more is dropped, and what the cache has must be learnt anew. They are fetched all the time."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_REUSE = "kv_cache_config.enable_block_reuse"
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
    sampler: ModelSampler
    quantization: str = "none"
    encoder: Encoder | None = None
    """Set for a model that is not served for text."""

    def __str__(self) -> str:
        """The plan in Python, without secrets: for the log and for `sluice build --dry-run`."""
        return as_python(getattr(self.llm_class, "__name__", str(self.llm_class)), self.arguments)

    @property
    def num_gpus(self) -> int:
        """Ranks of the model: one a GPU."""
        return math.prod(self.arguments.get(name) or 1 for name in RANKS)

    @property
    def sampling_fields(self) -> tuple[str, ...]:
        """`EngineInfo.sampling_fields`."""
        return tuple(name for name in OPTIONAL_FIELDS if name not in self.sampler.refusals)


def plan_llm(config: EngineConfig, folder: LlmFolder, library: TensorRtLlmLibrary) -> LlmPlan:
    """Resolve every argument, and check it against the installed version first. Raises INVALID or UNIMPLEMENTED that
    names the setting, what it held and what is expected or which version has it."""
    settings = SETTINGS.check(config.runtime_settings)
    arguments = _gather(config)
    llm_class, is_engine = _choose_class(arguments, folder, library)
    resolution = Resolution(config, folder, library, arguments, is_engine, library.arguments_class(is_engine=is_engine))
    if library.version.release[:2] > NEWEST.release:
        resolution.notes.append(f"TensorRT-LLM {library.version} is newer than {NEWEST}, the last that is known here")
    resolution.notes.extend((*TENSORRT_LLM.notes_on_ignored(config), *SETTINGS.notes(config.runtime_settings)))
    encoder = resolve_encoder(resolution)
    limits = resolve_limits(resolution)
    if not is_engine and arguments.get("batching_type") == "INFLIGHT":
        resolution.leave_out("batching_type", "the PyTorch backend always batches in flight")
    resolve_speculation(resolution)
    quantization = _resolve_quantization(resolution)
    adapters = resolve_adapters(resolution, settings.get("lora_dir", ()))
    resolve_sleep(resolution)
    _resolve_tokenizer(resolution)
    resolve_transceiver(resolution)
    _add_defaults(resolution)
    check_arguments(resolution)
    _check_beams(resolution, limits.max_beam_width)
    return LlmPlan(
        llm_class=llm_class,
        arguments={"model": str(folder.path), **build_arguments(resolution)},
        notes=tuple(resolution.notes),
        max_num_seqs=limits.max_batch_size,
        max_num_batched_tokens=limits.max_num_tokens,
        max_model_len=limits.max_seq_len,
        max_beam_width=limits.max_beam_width,
        tokens_per_block=limits.tokens_per_block,
        adapters=adapters,
        sampler=_sampler(resolution, limits.max_beam_width),
        quantization=quantization,
        encoder=encoder,
    )


def _gather(config: EngineConfig) -> ArgumentSet:
    """Gather all sources: EngineConfig's fields, the settings, and the raw arguments."""
    for name, allowed in (("dtype", TENSORRT_LLM.dtypes), ("kv_cache_dtype", TENSORRT_LLM.kv_cache_dtypes)):
        if (word := getattr(config, name)) not in allowed:
            raise invalid(name, f"{name} must be one of {', '.join(allowed)} with TensorRT-LLM, got {word!r}")
    arguments = ArgumentSet()
    add_fields(arguments, config)
    for given in SETTINGS.parse(config.runtime_settings):
        if given.setting.target:
            for target, value in flattened({given.setting.target: given.value}).items():
                _add_given(arguments, target, value, given.name, Precedence.GIVEN)
    add_speculation_fields(arguments, config)
    for target, value in flattened(config.llm_arguments).items():
        if target in _DERIVED:
            raise invalid("llm_arguments", f"llm_arguments must not have {target}: it follows from the model")
        _add_given(arguments, target, value, f"llm_arguments.{target}", Precedence.RAW)
    return arguments


def _add_given(arguments: ArgumentSet, target: str, value: Any, origin: str, precedence: Precedence) -> None:
    """Add a value that may be anything. Raises INVALID for a configuration that has no fields."""
    if value is None and target in DEFAULTED:
        return
    is_config = target in CONFIGS and target != "enable_build_cache"  # which may be a boolean too
    if is_config and value is not None and not isinstance(value, Mapping):
        raise invalid(origin, f"{origin} must be an object of its fields, got {value!r}")
    arguments.add(target, value, origin, precedence)


def _choose_class(arguments: ArgumentSet, folder: LlmFolder, library: TensorRtLlmLibrary) -> tuple[Any, bool]:
    """Return the LLM class, and whether it is that of compiled engines."""
    is_converted = folder.format is not ModelFormat.HUGGINGFACE
    backend = arguments.get("backend")
    allowed = ("tensorrt",) if is_converted else ("pytorch", "tensorrt")
    if "backend" in arguments and backend not in allowed:
        what = folder.format.value.replace("_", " ")
        raise arguments.refusal("backend", f"must be {' or '.join(allowed)} for a {what}, got {backend!r}")
    arguments.drop("backend")
    if backend == "tensorrt" and not is_converted:
        return library.engine_class("a model with backend tensorrt"), True
    return library.llm_class(folder.format), is_converted


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


def _check_beams(resolution: Resolution, width: int) -> None:
    """Raise INVALID for beams that TensorRT-LLM could not start with: its first request has one beam, and ordinary
    ones too."""
    if width == 1:
        return
    version, kind, name = resolution.library.version, _sampler_kind(resolution), "max_beam_width"
    wide = f"in TensorRT-LLM {version} every request must then be {width} beams wide, those without a search too"
    if kind is SamplerKind.ENGINE:
        compiled = f"{resolution.folder.path} was compiled for {width} beams"
        raise invalid(name, f"{compiled}: {wide}; compile it for max_beam_width 1")
    if kind is SamplerKind.ONE_MODEL:
        raise resolution.arguments.refusal(name, f"must be 1 with speculation by one model, got {width}")
    if kind is SamplerKind.TRTLLM or version < Version(BEAMS_SINCE):
        needed = f"beams need TorchSampler of {BEAMS_SINCE} or later"
        raise resolution.arguments.refusal(name, f"must be 1, got {width}: {wide}; {needed}")


def _resolve_tokenizer(resolution: Resolution) -> None:
    """Only guided decoding needs a tokenizer in TensorRT-LLM: ids come in and go out."""
    arguments = resolution.arguments
    place = Path(arguments.get("tokenizer") or resolution.folder.path)
    has_fast_tokenizer = (place / _TOKENIZER_FILES[0]).is_file()
    is_known = arguments.get(DECODING_TYPE) in WITH_GRAMMARS or not arguments.within(SPECULATION)
    if has_fast_tokenizer and not resolution.is_engine and is_known and _GUIDANCE not in arguments:
        arguments.add_default(_GUIDANCE, XGRAMMAR)
    if resolution.is_engine and arguments.get(_GUIDANCE) == LLGUIDANCE:
        only = "only the PyTorch backend has llguidance"
        raise arguments.refusal(_GUIDANCE, f"must be xgrammar with a compiled engine; {only}")
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
    """Add the adapter's own choices; what this version lacks is left out later. The library's choice of a sampler is
    one that ignores penalties, where there is another; one-model speculation is greedy unless it is told to sample.
    Later versions report their use to NVIDIA unless they are told not to."""
    arguments = resolution.arguments
    arguments.add_default("kv_cache_config.free_gpu_memory_fraction", 0.9)
    for name in ("enable_iter_perf_stats", "return_perf_metrics", "telemetry_config.disabled"):
        arguments.add_default(name, True)
    if _are_events_followed(resolution):
        arguments.add_default("kv_cache_config.event_buffer_max_size", _EVENT_BUFFER)
    if resolution.is_engine or resolution.library.version >= Version(PENALTIES_SINCE):
        return
    if arguments.within(SPECULATION):
        arguments.add_default(ADVANCED_SAMPLING, True)
    else:
        arguments.add_default("sampler_type", SamplerKind.TRTLLM.value)


def _are_events_followed(resolution: Resolution) -> bool:
    """Return whether somebody may ask what is cached, and events of the KV cache that are fetched can tell. They cost
    this process a millisecond for each thousand tokens that are computed."""
    config, arguments = resolution.config, resolution.arguments
    if not (config.is_replica or config.listening or config.kv_events_endpoint):
        return False
    streams_events = arguments.get("kv_cache_config.kv_events_config.enable_kv_cache_events")
    return arguments.get(_REUSE) is not False and not (arguments.get("enable_attention_dp") or streams_events)


def _sampler(resolution: Resolution, max_beam_width: int) -> ModelSampler:
    arguments, build = resolution.arguments, resolution.folder.build_config or {}
    on = {name for name in (ADVANCED_SAMPLING, ENABLE_PENALTY, GATHER_GENERATION) if arguments.get(name)}
    if build.get(GATHER_CONTEXT) or arguments.get(f"build_config.{GATHER_CONTEXT}"):
        on.add(GATHER_CONTEXT)
    return ModelSampler(_sampler_kind(resolution), resolution.library.version, frozenset(on), max_beam_width)


def _sampler_kind(resolution: Resolution) -> SamplerKind:
    """Return the sampler that runs, which is not always the chosen one: speculation brings its own."""
    arguments, version = resolution.arguments, resolution.library.version
    if resolution.is_engine:
        return SamplerKind.ENGINE
    if arguments.within(SPECULATION):
        may_be_two = arguments.get(f"{SPECULATION}.eagle3_one_model") is False
        is_own = is_one_model(arguments.get(DECODING_TYPE), version, may_be_two=may_be_two)
        return SamplerKind.ONE_MODEL if is_own else SamplerKind.TORCH
    return SamplerKind.TRTLLM if arguments.get("sampler_type") == SamplerKind.TRTLLM.value else SamplerKind.TORCH
