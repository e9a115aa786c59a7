"""Parses the plain values of a row, with Triton's defaults and limits, into a request to an LLM."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from sluice.engine.sampling_fields import MAX_BIAS, MAX_SEED, SAMPLING_FIELDS, SamplingField
from sluice.engine.types import Grammar, GrammarKind
from sluice.errors import invalid
from sluice.pipelines.llm.configuration import QueueDefaults
from sluice.pipelines.llm.fields import LLM_API_PREFIX, PROMPTS
from sluice.pipelines.llm.services import RequestLimits
from sluice.pipelines.llm.tokens import TokenSequences
from sluice.pipelines.llm.values import SEQUENCES, Values
from sluice.pipelines.text.tensor_model import decode_messages
from sluice.pipelines.text.types import (
    ChatMessage,
    Conversation,
    ImagePart,
    PlainPrompt,
    SamplingOverrides,
    TextRequest,
)
from sluice.serving.request import InferRequest

_GUIDE_TYPES = {
    "json": GrammarKind.JSON_OBJECT,
    "json_schema": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "ebnf_grammar": GrammarKind.EBNF,
}
_BIAS, _BIAS_WORDS, _BIAS_WEIGHTS = "embedding_bias", "embedding_bias_words", "embedding_bias_weights"
_IMAGE_URL = "image_url"
_TEXT_OUTPUT, _TOKEN_OUTPUTS = "text_output", ("output_ids", "sequence_length")
MAX_RETURN_SEQUENCES = 128
GUIDE, GUIDE_TYPE = "guided_decoding_guide", "guided_decoding_guide_type"
NO_TOKEN = -1
"""TensorRT-LLM's end_id for no token, and the padding of its lists of words."""
LENGTH_NAMES = ("max_tokens", *SAMPLING_FIELDS["max_tokens"].aliases, f"{LLM_API_PREFIX}max_tokens")
"""The names of a request's longest output."""
MAX_SEQUENCES = 256
"""Most token sequences in a list of stop or bad words. It bounds the cost of checking each token."""
LLM_API_MAX_TOKENS = 32
"""The longest output of a request to NVIDIA's llmapi model that names none: the LLM class's own default."""
MAX_SALT_CHARS = 256
_US_PER_S = 1_000_000
MAX_TIMEOUT_S = 1e7
"""About four months. A longer timeout is taken for an error."""


@dataclass(frozen=True, slots=True)
class RowRequest:
    """The request of one row. `pad_id` pads its output to the length of its batch's longest. `prompt` is the prompt
    where the output is to begin with it, else empty. `stop` and `bad` are token sequences. An answer has text or
    tokens, as the prompt is, and the other one too where it `gives_both`. `max_tokens_name` is the request's name for
    `max_tokens`."""

    request: TextRequest
    prompt: str | list[int]
    is_tokens: bool
    stop: TokenSequences
    bad: TokenSequences
    pad_id: int | None
    returns_input_count: bool
    returns_output_count: bool
    returns_log_probs: bool
    returns_stop_reason: bool
    num_sequences: int
    gives_both: bool
    max_tokens_name: str

    @property
    def gives_text(self) -> bool:
        return self.gives_both or not self.is_tokens

    @property
    def gives_tokens(self) -> bool:
        return self.gives_both or self.is_tokens

    @property
    def needs_details(self) -> bool:
        """Whether the answer has what only the engine's own events carry."""
        request = self.request
        return request.returns_metrics or request.returns_context_logits or request.returns_generation_logits

    def split_sequences(self) -> "list[RowRequest]":
        """Return a request for each of the row's sequences, which have seeds one after the other."""
        sampling = self.request.sampling
        if self.num_sequences == 1 or "seed" not in sampling:
            return [self] * self.num_sequences
        seeds = ((sampling["seed"] + number) & MAX_SEED for number in range(self.num_sequences))
        requests = (structs.replace(self.request, sampling=sampling | {"seed": seed}) for seed in seeds)
        return [replace(self, request=request) for request in requests]


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """One model's defaults for requests, and the LoRA adapters that requests may name. `excludes_input` applies to
    prompts of token ids. Answers to text leave the prompt out by default."""

    eos_token_ids: Sequence[int]
    excludes_input: bool
    queue: QueueDefaults
    limits: RequestLimits
    vocab_size: int
    adapters: Sequence[str] = ()
    adapter_folders: Mapping[str, str] = field(default_factory=dict)
    """Folders by adapter, as far as they are known."""
    temperature_samples: bool = True
    """Whether a temperature alone samples."""
    is_llm_api: bool = False
    """Whether the inputs are those of NVIDIA's llmapi model, whose defaults are those of TensorRT-LLM's LLM class."""


def parse_row_request(values: Values, request: InferRequest, model: ModelDefaults) -> RowRequest:
    """Parse a row of `request` with the given values. Raises SluiceError INVALID for values that make no sense."""
    is_tokens = "input_ids" in values
    end_id = values.get("end_id")
    prompt = _prompt(values)
    others = (_TEXT_OUTPUT,) if is_tokens else _TOKEN_OUTPUTS
    gives_both = any(name in others for name in request.requested_outputs)
    text_request = _text_request(values, request, prompt, model)
    if gives_both and not is_tokens:  # the tokens that the text is made of come with their log probabilities
        text_request = structs.replace(text_request, sampling={"logprobs": 0} | text_request.sampling)
    return RowRequest(
        request=text_request,
        prompt=_shown_prompt(values, prompt, excludes_input=model.excludes_input or not is_tokens),
        is_tokens=is_tokens,
        stop=_sequences(values, "stop_words_list"),
        bad=_sequences(values, "bad_words_list"),
        pad_id=values.get("pad_id", None if end_id == NO_TOKEN else end_id),
        returns_input_count=values.get("return_num_input_tokens", False),
        returns_output_count=values.get("return_num_output_tokens", False),
        returns_log_probs=values.get("return_log_probs", False),
        returns_stop_reason=_returns_stop_reason(values, is_tokens=is_tokens),
        num_sequences=_num_sequences(values),
        gives_both=gives_both,
        max_tokens_name=next((name for name in LENGTH_NAMES if _has(request, name)), LENGTH_NAMES[0]),
    )


def _text_request(values: Values, request: InferRequest, prompt: PlainPrompt, model: ModelDefaults) -> TextRequest:
    return TextRequest(
        request_id=request.id or "-",
        prompt=prompt,
        sampling=_sampling(values, model),
        # As in chat completions, only the context limits a conversation.
        default_max_tokens=None if "messages" in values else _default_max_tokens(model),
        stop=_stop_words(values),
        bad_words=_words(values, "bad_words"),
        biased_words=_biased_words(values),
        priority=model.queue.priority(request.priority),
        tenant=request.tenant,
        session=request.session or str(request.correlation_id or ""),
        parent_session=request.parent_session,
        cache_salt=check_cache_salt(values.get("cache_salt", "")),
        timeout_s=parse_timeout("timeout", request.timeout_us) or model.limits.timeout_s,
        queue_timeout_s=_queue_timeout_s(request, model.queue.timeout_us) or model.limits.queue_timeout_s,
        adapter=_adapter(values, model),
        protocol=request.protocol,
        returns_metrics=values.get("return_perf_metrics", False),
        returns_context_logits=values.get("return_context_logits", False),
        returns_generation_logits=values.get("return_generation_logits", False),
    )


def _default_max_tokens(model: ModelDefaults) -> int:
    return LLM_API_MAX_TOKENS if model.is_llm_api else int(SAMPLING_FIELDS["max_tokens"].default)


def _returns_stop_reason(values: Values, *, is_tokens: bool) -> bool:
    asked: bool = values.get("return_stop_reason", False)
    if asked and is_tokens:
        raise invalid("return_stop_reason", "return_stop_reason must be false with input_ids: it goes with text_input")
    return asked


def _has(request: InferRequest, name: str) -> bool:
    return name in request.inputs or name in request.parameters


def _num_sequences(values: Values) -> int:
    number: int = values.get(SEQUENCES, 1)
    if not 1 <= number <= MAX_RETURN_SEQUENCES:
        raise invalid(SEQUENCES, f"{SEQUENCES} must be between 1 and {MAX_RETURN_SEQUENCES}, got {number}")
    if number > 1 and values.get("beam_width", 1) > 1:
        raise invalid(SEQUENCES, f"{SEQUENCES} must be 1 with a beam_width above 1, got {number}")
    return number


def _prompt(values: Values) -> PlainPrompt:
    given = [name for name in PROMPTS if name in values]
    if len(given) > 1:
        raise invalid(given[1], f"give {given[0]} or {given[1]}, not both")
    if urls := [url for url in values.get(_IMAGE_URL, ()) if url]:
        return _question(values, urls)
    if given[0] == "messages":
        return Conversation(decode_messages(values["messages"]))
    if given[0] == "text_input":
        text: str = values["text_input"]
        return text
    token_ids: list[int] = values["input_ids"]
    length = values.get("input_lengths", len(token_ids))
    if not 0 <= length <= len(token_ids):
        message = f"input_lengths must be between 0 and the {len(token_ids)} tokens of input_ids, got {length}"
        raise invalid("input_lengths", message)
    return token_ids[:length]


def _question(values: Values, urls: Sequence[str]) -> Conversation:
    """Return a user's question about images, as NVIDIA's llmapi model makes it: the chat template renders it."""
    if "text_input" not in values:
        raise invalid(_IMAGE_URL, f"{_IMAGE_URL} goes with text_input, which is the question about the images")
    images = [ImagePart(url, f"{_IMAGE_URL}[{place}]") for place, url in enumerate(urls)]
    text: str = values["text_input"]
    return Conversation((ChatMessage("user", text, parts=(*images, text)),))


def _shown_prompt(values: Values, prompt: PlainPrompt, *, excludes_input: bool) -> str | list[int]:
    """Return what the output begins with."""
    if isinstance(prompt, Conversation):
        if not values.get("exclude_input_in_output", True):
            raise invalid("exclude_input_in_output", "exclude_input_in_output must be true with messages and images")
        return ""
    return prompt[:0] if values.get("exclude_input_in_output", excludes_input) else prompt


def _sampling(values: Values, model: ModelDefaults) -> SamplingOverrides:
    """Read the fields over TensorRT-LLM's defaults. generation_config.json is not used here."""
    fields = {name: field for name, field in SAMPLING_FIELDS.items() if field.datatype}
    sampling = {name: field.default for name, field in fields.items() if not field.is_optional}
    sampling |= {name: values[name] for name in fields if name in values}
    if not any(name in values for name, field in fields.items() if _enables_sampling(field, model)):
        sampling["temperature"] = 0.0
    if "early_stopping" in sampling:
        sampling["early_stopping"] = int(sampling["early_stopping"])
    sampling["top_k"], sampling["top_p"] = _top(values, model)
    sampling["stop_token_ids"], sampling["ignore_eos"] = _ends(values, model.eos_token_ids)
    if "max_tokens" not in values:
        del sampling["max_tokens"]
    given = {
        "logit_bias": _token_biases(values, model.vocab_size),
        "grammar": _grammar(values.get(GUIDE_TYPE, ""), values.get(GUIDE, "")),
        "logprobs": 0 if values.get("return_log_probs") else None,
    }
    return {name: value for name, value in (sampling | given).items() if value is not None}


def _enables_sampling(field: SamplingField, model: ModelDefaults) -> bool:
    """Return whether a request with this field samples. In TensorRT-LLM (setupTopKRuntimeArgs of its decoder) top_k 0
    and top_p 0, their defaults, mean top_k 1, whatever the temperature is."""
    return field.enables_sampling and (model.temperature_samples or field.name != "temperature")


def _top(values: Values, model: ModelDefaults) -> tuple[int, float]:
    """Return top_k and top_p. TensorRT-LLM's clients send a top_p of 0: it is off beside a top_k, and greedy alone. To
    the LLM class it is greedy in any case."""
    top_k, top_p = values.get("top_k", 0), values.get("top_p", 1.0)
    if top_p == 0.0:
        return (1 if model.is_llm_api else top_k or 1), 1.0
    return top_k, top_p


def _ends(values: Values, eos_token_ids: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Return the tokens that end the output, and whether to ignore the model's own."""
    ends = tuple(values.get("stop_token_ids", ()))
    ignore_eos = values.get("ignore_eos", False)
    end_id = values.get("end_id")
    if end_id is None or end_id in eos_token_ids:
        return ends, ignore_eos
    if end_id < NO_TOKEN:
        raise invalid("end_id", f"end_id must be a token id or {NO_TOKEN} for none, got {end_id}")
    return (ends if end_id == NO_TOKEN else (*ends, end_id)), True


def _words(values: Values, name: str) -> tuple[str, ...]:
    """Return the words but "", which TensorRT-LLM's examples send for none because some versions required the input."""
    return tuple(word for word in values.get(name, ()) if word)


def _stop_words(values: Values) -> tuple[str, ...]:
    words = _words(values, "stop_words")
    if words and "input_ids" in values:
        raise invalid("stop_words", "stop_words go with text_input; with input_ids give stop_words_list")
    return words


def _sequences(values: Values, name: str) -> TokenSequences:
    """Unpack TensorRT-LLM's [2, n]: all words' tokens end to end, and the end of each word, padded with -1."""
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


def _token_biases(values: Values, vocab_size: int) -> dict[int, float] | None:
    """Return the biases by token id. Entries past the vocabulary, its padding, must be 0."""
    biases: dict[int, float] | None = values.get(_BIAS)
    for token_id, bias in (biases or {}).items():
        if token_id >= vocab_size:
            message = (
                f"must be 0 for what is no token of this model, which has {vocab_size}, got {bias:g} at {token_id}"
            )
            raise invalid(_BIAS, f"input '{_BIAS}' {message}")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            message = (
                f"must be between {-MAX_BIAS:g} and {MAX_BIAS:g} for each token, got {bias:g} for token {token_id}"
            )
            raise invalid(_BIAS, f"input '{_BIAS}' {message}")
    return biases


def _biased_words(values: Values) -> tuple[tuple[str, float], ...]:
    """Return the words with their weights, from two lists of one length. Clients send "" and 0 for none."""
    words, weights = values.get(_BIAS_WORDS, []), values.get(_BIAS_WEIGHTS, [])
    if len(words) != len(weights) and (any(words) or any(weights)):
        message = f"input '{_BIAS_WEIGHTS}' has {len(weights)} elements for the {len(words)} of {_BIAS_WORDS}"
        raise invalid(_BIAS_WEIGHTS, message)
    return tuple((word, weight) for word, weight in zip(words, weights, strict=False) if word and weight)


def _grammar(kind: str, guide: str) -> Grammar | None:
    """Return the grammar of TensorRT-LLM's two inputs; "" stands for none."""
    if not kind:
        if guide:
            raise invalid(
                GUIDE_TYPE, f"input '{GUIDE_TYPE}' is needed with '{GUIDE}': one of {', '.join(_GUIDE_TYPES)}"
            )
        return None
    if kind not in _GUIDE_TYPES:
        raise invalid(GUIDE_TYPE, f"input '{GUIDE_TYPE}' must be one of {', '.join(_GUIDE_TYPES)}, got '{kind[:40]}'")
    if not guide and kind != "json":
        raise invalid(GUIDE, f"input '{GUIDE}' is needed where '{GUIDE_TYPE}' is {kind}")
    return Grammar(_GUIDE_TYPES[kind], "" if kind == "json" else guide)


def _adapter(values: Values, model: ModelDefaults) -> str:
    """Return the LoRA adapter, given by its name or by its place from 1; "" for none."""
    name: str = values.get("lora_name", "")
    place: int = values.get("lora_task_id", 0)
    alone = next((key for key in ("lora_id", "lora_path") if key in values), None)
    if alone is not None and not name:
        raise invalid(alone, f"input '{alone}' goes with lora_name, which names an adapter of this model")
    if not name and not place:
        return ""
    adapters = model.adapters
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
    _check_adapter_folder(values.get("lora_path", ""), name, model.adapter_folders)
    return name or adapters[place - 1]


def _check_adapter_folder(path: str, name: str, folders: Mapping[str, str]) -> None:
    """Raise INVALID for another folder than the adapter's: a request loads none."""
    if path and (name not in folders or os.path.normpath(path) != os.path.normpath(folders[name])):
        message = (
            f"input 'lora_path' must be the folder from which adapter '{name}' was loaded, as no request loads an "
            f"adapter; leave it out, got '{path[:80]}'"
        )
        raise invalid("lora_path", message)


def check_cache_salt(value: str) -> str:
    """Return the salt. Raises SluiceError INVALID for one that is too long."""
    if len(value) > MAX_SALT_CHARS:
        raise invalid("cache_salt", f"cache_salt must be a string of at most {MAX_SALT_CHARS} characters")
    return value


def _queue_timeout_s(request: InferRequest, default_us: int) -> float | None:
    """Return the queue timeout. The protocol's own wins over the request parameter."""
    timeout_us = request.queue_timeout_us or request.parameters.get("queue_timeout", default_us)
    return parse_timeout("queue_timeout", timeout_us)


def parse_timeout(name: str, microseconds: Any) -> float | None:
    """Convert the timeout `name` to seconds; None for 0, the default as in Triton. Raises INVALID for no duration."""
    if type(microseconds) is not int or not 0 <= microseconds <= MAX_TIMEOUT_S * _US_PER_S:
        most = round(MAX_TIMEOUT_S * _US_PER_S)
        raise invalid(name, f"parameter '{name}' must be a whole number of microseconds from 0 (none) to {most}")
    return microseconds / _US_PER_S or None
