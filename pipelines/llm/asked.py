"""From the plain values of a row to what is asked of the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.types import Grammar, GrammarKind
from pipelines.llm.biases import biased_words, token_biases
from pipelines.llm.fields import PROMPTS
from pipelines.llm.queueing import QueueRules
from pipelines.llm.services import RequestLimits
from pipelines.llm.tokens import TokenSequences
from pipelines.llm.values import Values
from pipelines.text.messages import decode_messages
from pipelines.text.runtime_fields import RUNTIME_FIELDS
from pipelines.text.types import PlainPrompt, SamplingOverrides, TextRequest
from serving.request import InferRequest
from sluice.errors import SluiceError, invalid

_MAX_TOKENS = 16
"""TensorRT-LLM's and vLLM's default. A conversation is answered to its end instead, as in chat completions."""
_DEFAULTS: dict[str, Any] = {
    "min_tokens": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": None,
}
"""TensorRT-LLM's: here a checkpoint's generation_config.json has no say."""
_SAMPLES = {"temperature", "top_k", "top_p", "min_p", "typical_p"}
"""Decoding is greedy unless one of these is given; then the temperature is 1 unless it is given."""
_GUIDES = {
    "json": GrammarKind.JSON_OBJECT,
    "json_schema": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "ebnf_grammar": GrammarKind.EBNF,
}
GUIDE, GUIDE_TYPE = "guided_decoding_guide", "guided_decoding_guide_type"
NO_TOKEN = -1
"""TensorRT-LLM's end_id that no token is, and what fills its lists of words up."""
MAX_SEQUENCES = 256
"""Most token sequences in a list of stop or bad words. It bounds what each token costs to check."""
MAX_SALT_CHARS = 256
_US_PER_S = 1_000_000
LONGEST_S = 1e7
"""About four months: what is longer is no deadline."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What one row asks for. `pad_id` fills its output up to the length of its batch's longest.

    `prompt` is what the output begins with: the prompt where it is asked for, else empty.
    """

    request: TextRequest
    prompt: str | list[int]
    is_tokens: bool
    stop: TokenSequences
    bad: TokenSequences
    pad_id: int | None
    returns_input_count: bool
    returns_output_count: bool

    @property
    def returns_log_probs(self) -> bool:
        return self.request.sampling.logprobs is not None


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """What holds at one model for requests that do not say, and the LoRA adapters that they may name.

    `excludes_input` is for the token face; the text face leaves the prompt out unless told.
    """

    eos_token_ids: Sequence[int]
    excludes_input: bool
    queue: QueueRules
    limits: RequestLimits
    vocab_size: int
    adapters: Sequence[str] = ()


def asked_of(values: Values, request: InferRequest, model: ModelDefaults) -> Asked:
    """What a row of `request` with `values` asks for. Raises SluiceError INVALID for what makes no sense."""
    is_tokens = "input_ids" in values
    end_id = values.get("end_id")
    prompt = _prompt(values)
    return Asked(
        request=_text_request(values, request, prompt, model),
        prompt=_shown_prompt(values, prompt, excludes_input=model.excludes_input or not is_tokens),
        is_tokens=is_tokens,
        stop=_sequences(values, "stop_words_list"),
        bad=_sequences(values, "bad_words_list"),
        pad_id=values.get("pad_id", None if end_id == NO_TOKEN else end_id),
        returns_input_count=values.get("return_num_input_tokens", False),
        returns_output_count=values.get("return_num_output_tokens", False),
    )


def _text_request(values: Values, request: InferRequest, prompt: PlainPrompt, model: ModelDefaults) -> TextRequest:
    return TextRequest(
        request_id=request.id or "-",
        prompt=prompt,
        sampling=_sampling(values, model),
        stop=_stop_words(values),
        bad_words=_words(values, "bad_words"),
        biased_words=biased_words(values),
        priority=model.queue.priority(request.priority),
        tenant=request.tenant,
        cache_salt=_cache_salt(values.get("cache_salt", "")),
        timeout_s=seconds_of("timeout", request.timeout_us) or model.limits.timeout_s,
        queue_timeout_s=_queue_timeout_s(request, model.queue.timeout_us) or model.limits.queue_timeout_s,
        adapter=_adapter(values, model.adapters),
    )


def _prompt(values: Values) -> PlainPrompt:
    given = [name for name in PROMPTS if name in values]
    if len(given) > 1:
        raise invalid(given[1], f"give {given[0]} or {given[1]}, not both")
    if given[0] == "messages":
        return decode_messages(values["messages"])
    if given[0] == "text_input":
        text: str = values["text_input"]
        return text
    token_ids: list[int] = values["input_ids"]
    length = values.get("input_lengths", len(token_ids))
    if not 0 <= length <= len(token_ids):
        message = f"input_lengths must be between 0 and the {len(token_ids)} tokens of input_ids, got {length}"
        raise invalid("input_lengths", message)
    return token_ids[:length]


def _shown_prompt(values: Values, prompt: PlainPrompt, *, excludes_input: bool) -> str | list[int]:
    """What the output begins with."""
    if isinstance(prompt, tuple):
        if not values.get("exclude_input_in_output", True):
            raise invalid("exclude_input_in_output", "exclude_input_in_output must be true with messages")
        return ""
    return prompt[:0] if values.get("exclude_input_in_output", excludes_input) else prompt


def _sampling(values: Values, model: ModelDefaults) -> SamplingOverrides:
    temperature = 1.0 if _SAMPLES & values.keys() else 0.0
    top_k, top_p = _top(values)
    stop_token_ids, ignore_eos = _ends(values, model.eos_token_ids)
    return SamplingOverrides(
        max_tokens=values.get("max_tokens", None if "messages" in values else _MAX_TOKENS),
        temperature=values.get("temperature", temperature),
        top_k=top_k,
        top_p=top_p,
        logit_bias=token_biases(values, model.vocab_size),
        grammar=_grammar(values.get(GUIDE_TYPE, ""), values.get(GUIDE, "")),
        logprobs=0 if values.get("return_log_probs") else None,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        **{name: values.get(name, default) for name, default in _DEFAULTS.items()},
        **_runtime_fields(values),
    )


def _runtime_fields(values: Values) -> dict[str, Any]:
    fields = {name: values.get(name) for name in RUNTIME_FIELDS}
    if fields["early_stopping"] is not None:
        fields["early_stopping"] = int(fields["early_stopping"])
    return fields


def _top(values: Values) -> tuple[int, float]:
    """top_k and top_p. A top_p of 0, which TensorRT-LLM's clients send, is off beside a top_k, and alone is greedy."""
    top_k, top_p = values.get("top_k", 0), values.get("top_p", 1.0)
    return (top_k or 1, 1.0) if top_p == 0.0 else (top_k, top_p)


def _ends(values: Values, eos_token_ids: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """The tokens that end the output, and whether the model's own do not."""
    ends = tuple(values.get("stop_token_ids", ()))
    ignore_eos = values.get("ignore_eos", False)
    end_id = values.get("end_id")
    if end_id is None or end_id in eos_token_ids:
        return ends, ignore_eos
    if end_id < NO_TOKEN:
        raise invalid("end_id", f"end_id must be a token id or {NO_TOKEN} for none, got {end_id}")
    return (ends if end_id == NO_TOKEN else (*ends, end_id)), True


def _words(values: Values, name: str) -> tuple[str, ...]:
    """Clients send "" for none: TensorRT-LLM's examples do, as some of its versions required the input."""
    return tuple(word for word in values.get(name, ()) if word)


def _stop_words(values: Values) -> tuple[str, ...]:
    words = _words(values, "stop_words")
    if words and "input_ids" in values:
        raise invalid("stop_words", "stop_words go with text_input; with input_ids give stop_words_list")
    return words


def _sequences(values: Values, name: str) -> TokenSequences:
    """TensorRT-LLM's [2, n]: the tokens of all words in a row, and where each ends, filled up with -1."""
    flat: list[int] = values.get(name, [])
    half = len(flat) // 2
    token_ids, ends = flat[:half], [end for end in flat[half:] if end != NO_TOKEN]
    if name == "stop_words_list" and ends and "input_ids" not in values:
        raise invalid(name, f"{name} goes with input_ids; with text_input give stop_words")
    starts = [0, *ends[:-1]]
    if len(flat) % 2 or any(not start < end <= half for start, end in zip(starts, ends, strict=False)):
        raise invalid(
            name,
            f"{name} must hold two rows of one length: all token ids, and the index after the last one of each word "
            f"in rising order, filled up with {NO_TOKEN}",
        )
    if len(ends) > MAX_SEQUENCES:
        raise invalid(name, f"{name} has {len(ends)} words; at most {MAX_SEQUENCES} are allowed")
    return tuple(tuple(token_ids[start:end]) for start, end in zip(starts, ends, strict=False))


def _grammar(kind: str, guide: str) -> Grammar | None:
    """TensorRT-LLM's two inputs, where "" is none."""
    if not kind:
        if guide:
            raise invalid(GUIDE_TYPE, f"input '{GUIDE_TYPE}' is needed with '{GUIDE}': one of {', '.join(_GUIDES)}")
        return None
    if kind not in _GUIDES:
        raise invalid(GUIDE_TYPE, f"input '{GUIDE_TYPE}' must be one of {', '.join(_GUIDES)}, got '{kind[:40]}'")
    if not guide and kind != "json":
        raise invalid(GUIDE, f"input '{GUIDE}' is needed where '{GUIDE_TYPE}' is {kind}")
    return Grammar(_GUIDES[kind], "" if kind == "json" else guide)


def _adapter(values: Values, adapters: Sequence[str]) -> str:
    """The LoRA adapter that is named, by its name or by its place from 1; "" for none."""
    name: str = values.get("lora_name", "")
    place: int = values.get("lora_task_id", 0)
    if not name and not place:
        return ""
    _check_adapter(name, place, adapters)
    return name or adapters[place - 1]


def _check_adapter(name: str, place: int, adapters: Sequence[str]) -> None:
    listed = ", ".join(f"{number} {each}" for number, each in enumerate(adapters, 1))
    if name and name not in adapters:
        raise invalid("lora_name", f"input 'lora_name' must be an adapter of this model ({listed}), got '{name[:40]}'")
    if not 0 <= place <= len(adapters):
        allowed = f"at most {len(adapters)}, the place of an adapter of this model ({listed})"
        raise invalid("lora_task_id", f"input 'lora_task_id' must be {allowed}, got {place}")
    if name and place and adapters[place - 1] != name:
        other = adapters[place - 1]
        message = f"inputs 'lora_name' ('{name}') and 'lora_task_id' ({place}, '{other}') name two adapters"
        raise invalid("lora_task_id", message)


def _cache_salt(value: str) -> str:
    if len(value) > MAX_SALT_CHARS:
        raise invalid("cache_salt", f"cache_salt must be a string of at most {MAX_SALT_CHARS} characters")
    return value


def _queue_timeout_s(request: InferRequest, default_us: int) -> float | None:
    """What the server was told of a request wins over its parameter."""
    asked = request.queue_timeout_us or request.parameters.get("queue_timeout", default_us)
    return seconds_of("queue_timeout", asked)


def seconds_of(name: str, microseconds: Any) -> float | None:
    """Of the parameter `name`; 0 asks for what holds without it, as in Triton. Raises INVALID for what is no time."""
    if type(microseconds) is not int or not 0 <= microseconds <= LONGEST_S * _US_PER_S:
        raise _no_duration(name)
    return microseconds / _US_PER_S or None


def _no_duration(name: str) -> SluiceError:
    most = round(LONGEST_S * _US_PER_S)
    return invalid(name, f"parameter '{name}' must be a whole number of microseconds from 0 (none) to {most}")
