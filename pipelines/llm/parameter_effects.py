"""Effects of an LLM's config.pbtxt parameters on its engine, and the parameters whose effect no runtime changes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sluice.engine.config import DTYPE_WORDS, Runtime, SchedulerPolicy, Speculation
from sluice.engine.runtime_settings import RuntimeSetting

MAX_SEQS, MAX_DRAFT_TOKENS, MAX_THREADS = 4096, 32, 1024
"""Limits of the same options on the command line."""

UNSET_CACHE_SIZE: dict[str, Any] = {"num_blocks": None, "kv_cache_memory_bytes": None, "kv_cache_memory_fraction": None}
"""Clears the command line's size of the KV cache, in any of its forms. A model's own size wins over it."""


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of one parameter. One that only has a note does nothing, for the reason in the note."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Values of EngineConfig by field."""
    note: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Texts for `EngineConfig.runtime_settings`, by the names in the runtime's `RuntimeSpec.settings`."""


Rule = Callable[[str], Effect]
"""Reads a parameter's text. Raises ValueError that says what the text must be, or what to do instead."""

NOTHING = Effect()


# -- readers of texts. Each raises ValueError that says what the text must be.


def parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("true", "1"):
        return True
    if lowered in ("false", "0"):
        return False
    raise ValueError("must be true or false")


def parse_integer(text: str, least: int, most: int | None = None) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        raise ValueError(f"must be an integer of at least {least}" + (f" and at most {most}" if most else ""))
    return value


def parse_fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise ValueError("must be a number above 0 and at most 1")
    return value


def parse_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError):
        raise ValueError("must be a JSON object") from None


_DTYPES = {**{each: each for each in ("auto", "bf16", "f32", "float16")}, **DTYPE_WORDS}


def parse_dtype(text: str) -> str:
    """Return vLLM's or torch's name of a precision as `EngineConfig.dtype` has it."""
    found = _DTYPES.get(text.lower())
    if found is None:
        raise ValueError(f"must be one of {', '.join(_DTYPES)}")
    return found


# -- makers of rules


def integer_field(name: str, least: int = 1, most: int | None = None) -> Rule:
    """Return a rule that sets a field of EngineConfig to an integer."""
    return lambda text: Effect({name: parse_integer(text, least, most)})


def choice_field(name: str, *allowed: str) -> Rule:
    """Return a rule that sets a field of EngineConfig to one of the allowed texts."""

    def rule(text: str) -> Effect:
        if text not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return Effect({name: text})

    return rule


def ignored(reason: str) -> Rule:
    """Return a rule that only notes why the parameter has no effect."""
    return lambda text: Effect(note=reason)


def ignored_unless(neutral: tuple[str, ...], reason: str) -> Rule:
    """Return a rule that notes why the parameter has no effect, except for values that describe what happens anyway."""
    return lambda text: NOTHING if text.lower() in neutral else Effect(note=reason)


def setting_rule(setting: RuntimeSetting) -> Rule:
    """Return a rule that sets a setting of the runtime, or notes why it has no effect."""
    if setting.no_effect:
        return ignored(setting.no_effect)

    def rule(text: str) -> Effect:
        try:
            setting.parse(text)
        except ValueError as error:
            raise ValueError(f"must be {error}") from None
        return Effect(settings={setting.name: text})

    return rule


# -- what chooses code to run

FROM_COMMAND_LINE = "what chooses code to run is taken from the command line alone, by --runtime-setting"
"""Models may be uploaded by a request."""

CodeChoices = Mapping[str, Callable[[Any], bool]]
"""A runtime's arguments that choose code to run, dotted below a configuration: whether a value of one does."""


def chooses_code(name: str, value: Any, choices: CodeChoices) -> bool:
    """Whether the argument `name` with this value chooses code to run: an argument in `choices` or below one, or a
    configuration that has one inside."""
    own = [test for choice, test in choices.items() if f"{name}.".startswith(f"{choice}.")]
    if own:
        return any(test(value) for test in own)
    if not isinstance(value, Mapping) or not any(choice.startswith(f"{name}.") for choice in choices):
        return False
    return any(chooses_code(f"{name}.{key}", inner, choices) for key, inner in value.items())


def guarded(rule: Rule, name: str, parse: Callable[[str], Any], choices: CodeChoices) -> Rule:
    """Return `rule` for the texts of the argument `name` that choose no code. Others have no effect. `parse` reads a
    text as the runtime does; what it cannot read is for `rule` to refuse."""

    def guarded_rule(text: str) -> Effect:
        try:
            value = parse(text)
        except ValueError:
            return rule(text)
        return Effect(note=FROM_COMMAND_LINE) if chooses_code(name, value, choices) else rule(text)

    return guarded_rule


def rejected(message: str) -> Rule:
    """Return a rule that accepts no text."""

    def rule(text: str) -> Effect:
        raise ValueError(message)

    return rule


def handled_elsewhere(text: str) -> Effect:
    """Do nothing, for a parameter that is read before the rules are applied."""
    return NOTHING


# -- parameters with one effect on every runtime


def _policy(text: str) -> Effect:
    try:
        return Effect({"scheduler_policy": SchedulerPolicy(text.lower())})
    except ValueError:
        return Effect(note=f"'{text[:40]}' is no policy; {SchedulerPolicy.GUARANTEED_NO_EVICT} holds")


def _batching(text: str) -> Effect:
    match text:
        case "inflight_fused_batching" | "inflight_batching":
            return NOTHING
        case "V1":
            return Effect({"scheduler_policy": SchedulerPolicy.STATIC_BATCH})
    raise ValueError("must be inflight_fused_batching, inflight_batching or V1")


def _cache_fraction(text: str) -> Effect:
    return Effect({**UNSET_CACHE_SIZE, "kv_cache_memory_fraction": parse_fraction(text)})


def _reuse(text: str) -> Effect:
    return Effect({"enable_prefix_caching": parse_bool(text)})


def checked_bool(text: str) -> Effect:
    """Check the text only, for a parameter that is read elsewhere."""
    parse_bool(text)
    return NOTHING


def parse_runtime(text: str) -> Runtime:
    """Parse the name of a runtime. Raises ValueError for any other text."""
    try:
        return Runtime(text.lower())
    except ValueError:
        raise ValueError(f"must be one of {', '.join(Runtime)}") from None


def _runtime(text: str) -> Effect:
    """Check the name only: the runtime was chosen before, as it decides which rules apply."""
    parse_runtime(text)
    return NOTHING


_NO_ENCODER = rejected("must be unset: models with an encoder are not offered")
NO_PERIOD = ignored("nothing is polled: cancellations and statistics arrive at once")
_ON_METRICS_PAGE = ignored("statistics are on the metrics page")

SHARED_RULES: dict[str, Rule] = {
    # TensorRT-LLM: batching
    "batch_scheduler_policy": _policy,
    "scheduler_policy": _policy,
    "gpt_model_type": _batching,
    "batching_type": _batching,
    "batching_strategy": _batching,
    "max_batch_size": integer_field("max_num_seqs", 1, MAX_SEQS),
    "max_num_sequences": integer_field("max_num_seqs", 1, MAX_SEQS),
    "max_num_tokens": integer_field("max_num_batched_tokens"),
    "max_queue_size": integer_field("max_queued_requests", 0),
    "max_queue_delay_microseconds": ignored("a request joins the running batch at its next step"),
    # TensorRT-LLM: KV cache
    "kv_cache_free_gpu_mem_fraction": _cache_fraction,
    "enable_kv_cache_reuse": _reuse,
    # TensorRT-LLM: answers
    "exclude_input_in_output": checked_bool,
    # chats
    "tool_call_parser": handled_elsewhere,
    "reasoning_parser": handled_elsewhere,
    # TensorRT-LLM: where things are
    "gpt_model_path": handled_elsewhere,
    "engine_dir": handled_elsewhere,
    "tokenizer_dir": handled_elsewhere,
    "tokenizer_type": ignored("the tokenizer is taken as its files say"),
    "xgrammar_tokenizer_info_path": ignored("grammars need no file"),
    "encoder_model_path": _NO_ENCODER,
    "encoder_engine_dir": _NO_ENCODER,
    # TensorRT-LLM: processes
    "executor_worker_path": ignored("the engine is a process of its own"),
    "cancellation_check_period_ms": NO_PERIOD,
    "stats_check_period_ms": NO_PERIOD,
    "recv_poll_period_ms": NO_PERIOD,
    # vLLM's engine arguments
    "model": handled_elsewhere,
    "tokenizer": handled_elsewhere,
    "gpu_memory_utilization": _cache_fraction,
    "seed": ignored("a request that samples without a seed gets one of its own"),
    "scheduling_policy": ignored("requests are ordered by priority, fair share and arrival"),
    "served_model_name": ignored("a model is called as its folder is"),
    "disable_log_stats": _ON_METRICS_PAGE,
    "disable_log_requests": ignored("requests are not logged"),
    "enable_metrics": _ON_METRICS_PAGE,
    "REPORT_CUSTOM_METRICS": _ON_METRICS_PAGE,
    # this engine's own parameters
    "runtime": _runtime,
    "max_model_len": integer_field("max_model_len", 2),
    "max_seq_len": integer_field("max_model_len", 2),
    "max_num_seqs": integer_field("max_num_seqs", 1, MAX_SEQS),
    "max_num_batched_tokens": integer_field("max_num_batched_tokens"),
    "max_queued_requests": integer_field("max_queued_requests", 0),
    "max_queued_tokens": integer_field("max_queued_tokens"),
    "num_blocks": lambda text: Effect({**UNSET_CACHE_SIZE, "num_blocks": parse_integer(text, 1)}),
    "enable_prefix_caching": _reuse,
    "speculation": choice_field("speculation", Speculation.OFF, Speculation.NGRAM),
    "num_speculative_tokens": integer_field("num_speculative_tokens", 1, MAX_DRAFT_TOKENS),
}
"""Rules by parameter."""
