"""From an EngineConfig to the arguments of TensorRT-LLM's LLM class."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.delegated.tensorrt_llm.configuration import adapters, fields, limits, objects, quantization, speculation
from engine.delegated.tensorrt_llm.configuration.catalogue.execution import GUIDED_DECODING_BACKEND
from engine.delegated.tensorrt_llm.configuration.describing import described
from engine.delegated.tensorrt_llm.configuration.samplers import choose_sampler, ignored_fields
from engine.delegated.tensorrt_llm.configuration.settings import check_settings, given, without_effect
from engine.delegated.tensorrt_llm.configuration.wishes import Strength, Wishes, flattened
from engine.delegated.tensorrt_llm.folder import ModelFolder
from engine.delegated.tensorrt_llm.library import Library
from engine.delegated.tensorrt_llm.sampling.grammars import LLGUIDANCE, XGRAMMAR
from engine.delegated.tensorrt_llm.versions import is_before
from engine.model_folder import ModelFormat
from engine.validation import RUNTIME_FIELDS
from sluice.errors import invalid

_BACKEND = "backend"
_FRACTION = "kv_cache_config.free_gpu_memory_fraction"
_KV_CACHE_FRACTION = 0.9
_WITH_STATISTICS = ("enable_iter_perf_stats", "return_perf_metrics")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
_OURS = frozenset({"model", "skip_tokenizer_init"})
"""Arguments that follow from the others."""


@dataclass(frozen=True, slots=True)
class LlmPlan:
    """How the LLM is made: `llm_class(**arguments)`."""

    llm_class: Any
    arguments: dict[str, Any]
    """By keyword; sub-configurations are objects of the library's classes."""
    notes: tuple[str, ...]
    """What was asked for and has no effect, for the log."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_beam_width: int
    tokens_per_block: int
    adapters: dict[str, str]
    """Folders of LoRA adapters by name, those of `lora_dir` included."""
    quantization: str = "none"
    ignored_sampling: frozenset[str] = frozenset()
    """Our sampling parameters that this version's sampler would not act on: requests that have them are refused."""

    @property
    def num_gpus(self) -> int:
        """Ranks of the model: one a GPU."""
        return math.prod(int(self.arguments.get(name) or 1) for name in _PARALLEL)

    @property
    def sampling_fields(self) -> tuple[str, ...]:
        """`EngineInfo.sampling_fields`."""
        return tuple(name for name in RUNTIME_FIELDS if name not in self.ignored_sampling)


def plan_llm(config: EngineConfig, folder: ModelFolder, library: Library) -> LlmPlan:
    """Every argument is checked against the installed version first.

    Raises SluiceError INVALID or UNIMPLEMENTED that names the setting, what it held and what is expected or which
    version has it.
    """
    settings = check_settings(config.runtime_settings)
    wishes = _wishes(config)
    llm_class, is_engine = _llm_class(wishes, folder, library)
    notes = [*fields.without_effect(config), *without_effect(config.runtime_settings)]
    tokens_per_block = limits.tokens_per_block(wishes, folder)
    fields.add_cache_size(wishes, config, tokens_per_block)
    limits.take_parallel_sizes(wishes, folder)
    found = limits.resolve(wishes, folder, is_engine=is_engine)
    notes += [*found.notes, *_batching(wishes, is_engine=is_engine)]
    speculation.resolve(wishes, config, library, is_engine=is_engine)
    quantized, told = quantization.resolve(wishes, config.quantization, folder, library, is_engine=is_engine)
    named = adapters.find_adapters(config.lora_modules, settings.get("lora_dir", ()))
    adapters.resolve(wishes, named, folder, is_engine=is_engine)
    notes += [*told, *_beam_search(wishes, found.max_beam_width, library, is_engine=is_engine)]
    _add_tokenizer(wishes, folder, is_engine=is_engine)
    _add_defaults(wishes, library.arguments(is_engine=is_engine))
    choose_sampler(wishes, library, is_engine=is_engine)
    objects.check_versions(wishes, library, is_engine=is_engine)
    return LlmPlan(
        llm_class,
        {"model": str(folder.path), **objects.build(wishes, library)},
        tuple(notes),
        found.max_batch_size,
        found.max_num_tokens,
        found.max_seq_len,
        found.max_beam_width,
        tokens_per_block,
        named,
        quantized,
        ignored_fields(wishes, library, found.max_beam_width, is_engine=is_engine),
    )


def describe(plan: LlmPlan) -> str:
    """The plan as one would write it in Python, without secrets: for the log and for `sluice build --dry-run`."""
    return described(plan.llm_class, plan.arguments)


def _wishes(config: EngineConfig) -> Wishes:
    """Of all sources: EngineConfig's fields, the settings, and the arguments as they are."""
    wishes = Wishes()
    fields.add_fields(wishes, config)
    for name, row, value in given(config.runtime_settings):
        if row.target:
            wishes.add(row.target, value, name, Strength.ASKED)
    speculation.add_fields(wishes, config)
    for target, value in flattened(config.llm_arguments, objects.SUB_CONFIGS).items():
        if target in _OURS:
            raise invalid("llm_arguments", f"llm_arguments must not have {target}: it follows from the model")
        if value is not None or target not in limits.DEFAULTED:
            wishes.add(target, value, f"llm_arguments.{target}", Strength.RAW)
    return wishes


def _llm_class(wishes: Wishes, folder: ModelFolder, library: Library) -> tuple[Any, bool]:
    """The class, and whether it is that of compiled engines."""
    is_converted = folder.format is not ModelFormat.HUGGINGFACE
    if _BACKEND in wishes:
        _check_backend(wishes.get(_BACKEND), wishes.origin(_BACKEND), folder, is_converted=is_converted)
    is_compiled_now = wishes.get(_BACKEND) == "tensorrt" and not is_converted
    wishes.drop(_BACKEND)
    if is_compiled_now:
        return library.engine_class("a model with backend tensorrt"), True
    return library.llm_class(folder.format), is_converted


def _check_backend(backend: str, origin: str, folder: ModelFolder, *, is_converted: bool) -> None:
    allowed = ("tensorrt",) if is_converted else ("pytorch", "tensorrt")
    if backend not in allowed:
        what = folder.format.value.replace("_", " ")
        raise invalid(origin, f"{origin} must be {' or '.join(allowed)} for a {what}, got {backend!r}")


def _batching(wishes: Wishes, *, is_engine: bool) -> list[str]:
    """The PyTorch backend batches in flight and has no argument for it."""
    if is_engine or wishes.get("batching_type") != "INFLIGHT":
        return []
    origin = wishes.origin("batching_type")
    wishes.drop("batching_type")
    return [f"{origin} has no effect: the PyTorch backend always batches in flight"]


def _beam_search(wishes: Wishes, width: int, library: Library, *, is_engine: bool) -> list[str]:
    """1.2 searches with several beams only without the overlap scheduler and CUDA graphs."""
    if is_engine or width == 1 or not is_before(library.version, "1.3"):
        return []
    wishes.add("disable_overlap_scheduler", True, "max_beam_width", Strength.DEFAULT)
    if not wishes.within("cuda_graph_config"):
        wishes.add("cuda_graph_config", None, "max_beam_width", Strength.DEFAULT)
    return ["max_beam_width above 1 runs without the overlap scheduler and CUDA graphs before TensorRT-LLM 1.3"]


def _add_tokenizer(wishes: Wishes, folder: ModelFolder, *, is_engine: bool) -> None:
    """Only guided decoding needs one in there: ids come in and go out."""
    place = Path(wishes.get("tokenizer") or folder.path)
    has_fast_tokenizer = (place / _TOKENIZER_FILES[0]).is_file()
    if has_fast_tokenizer and not is_engine and not wishes.within(objects.SPECULATION):
        wishes.add(GUIDED_DECODING_BACKEND, XGRAMMAR, "the adapter", Strength.DEFAULT)
    if is_engine and wishes.get(GUIDED_DECODING_BACKEND) == LLGUIDANCE:
        origin = wishes.origin(GUIDED_DECODING_BACKEND)
        raise invalid(
            origin, f"{origin} must be xgrammar with a compiled engine; only the PyTorch backend has llguidance"
        )
    if wishes.get(GUIDED_DECODING_BACKEND) is None:
        wishes.drop("tokenizer", GUIDED_DECODING_BACKEND)
        wishes.add("skip_tokenizer_init", True, "the adapter", Strength.DEFAULT)
        return
    if not any((place / file).is_file() for file in _TOKENIZER_FILES):
        raise invalid(
            "tokenizer_path",
            f"guided decoding needs the model's tokenizer, but {place} has none of {', '.join(_TOKENIZER_FILES)}; give "
            "tokenizer_path, or the setting guided_decoding_backend=none",
        )
    wishes.add("tokenizer", str(place), "the adapter", Strength.DEFAULT)


def _add_defaults(wishes: Wishes, known: frozenset[str]) -> None:
    wishes.add(_FRACTION, _KV_CACHE_FRACTION, "the adapter", Strength.DEFAULT)
    for name in _WITH_STATISTICS:
        if name in known:
            wishes.add(name, True, "the adapter", Strength.DEFAULT)
