"""How tokens are sampled: a model's defaults, fields of some runtimes only, bad words, biased words.

`build_request_parameters` translates a request's fields for a language model that is called through tensors.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.types import Grammar, GrammarKind, SamplingParams
from pipelines.text.tokenizer import Tokenizer
from pipelines.text.types import SamplingOverrides, TextRequest
from sluice.errors import ErrorCode, SluiceError, invalid

RequestParameters = dict[str, str | int | float | bool]

MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 1024
"""Characters. Both limits bound the cost of checking each sampled token."""
MAX_BIASED_WORDS = 256
MAX_BIASED_WORD_LENGTH = 1024
"""Characters."""
MAX_BIAS = 100.0
"""Largest absolute value of a token's bias."""
_BIAS_WORDS, _BIAS_WEIGHTS = "embedding_bias_words", "embedding_bias_weights"

_PLAIN_FIELDS = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "min_p", "typical_p", "seed", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Fields of which a request parameter has the same name and the same type."""
_GUIDE_TYPES = {
    GrammarKind.JSON_OBJECT: "json",
    GrammarKind.JSON_SCHEMA: "json_schema",
    GrammarKind.REGEX: "regex",
    GrammarKind.EBNF: "ebnf_grammar",
}


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """A model's values for sampling fields that a request leaves out. Those the model leaves out are OpenAI's."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0

    def resolve(self, sent: SamplingOverrides, max_tokens: int) -> SamplingParams:
        """Return the client's fields over these defaults, with the caller's `max_tokens`."""
        fields = msgspec.structs.asdict(self) | _set_fields(sent) | {"max_tokens": max_tokens}
        return SamplingParams(**fields)


class _GenerationConfig(msgspec.Struct, kw_only=True):
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None


def load_sampling_defaults(model_path: Path) -> SamplingDefaults:
    """Read the checkpoint's `generation_config.json`, which may be missing.

    `do_sample: false` means greedy. Raises SluiceError UNAVAILABLE for a file that cannot be decoded.
    """
    path = model_path / "generation_config.json"
    if not path.exists():
        return SamplingDefaults()
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_GenerationConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise SluiceError(ErrorCode.UNAVAILABLE, f"cannot read {path}: {error}") from error
    fields = _set_fields(config)
    if fields.pop("do_sample", True) is False:
        fields["temperature"] = 0.0
    return SamplingDefaults(**fields)


def _set_fields(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}


@dataclass(frozen=True, slots=True)
class RuntimeField:
    """A sampling field that only some runtimes have, and its values that have no effect.

    `off` values have no effect on any runtime, `unnoticed` ones have none on a runtime without the field.
    A field with `is_detail` refines another field, so no value of it has an effect where that one is missing.
    """

    off: tuple[float, ...] = ()
    unnoticed: tuple[float, ...] = ()
    is_detail: bool = False


RUNTIME_FIELDS: dict[str, RuntimeField] = {
    "beam_width": RuntimeField(unnoticed=(1,)),
    "length_penalty": RuntimeField(unnoticed=(0.0, 1.0)),
    "early_stopping": RuntimeField(is_detail=True),
    "beam_search_diversity_rate": RuntimeField(off=(0.0,)),
    "no_repeat_ngram_size": RuntimeField(off=(0,)),
    "top_p_min": RuntimeField(off=(0.0,)),
    "top_p_decay": RuntimeField(off=(0.0, 1.0)),
    "top_p_reset_ids": RuntimeField(is_detail=True),
}
"""Runtime fields by name in `engine.types.SamplingParams`. Clients of TensorRT-LLM send 0 for fields they leave out."""


_FIELDS_NOT_PASSED_ON = ("logit_bias", "logprobs", "prompt_logprobs", *RUNTIME_FIELDS)
"""Fields without an input of a language model, or with one that some language models would silently ignore."""


def drop_neutral_fields(sent: SamplingOverrides, supported: Collection[str]) -> SamplingOverrides:
    """Return `sent` without runtime fields whose value has no effect.

    `supported` are the `EngineInfo.sampling_fields` of the runtime.
    """
    dropped = {name: None for name, field in RUNTIME_FIELDS.items() if _is_neutral(sent, name, field, supported)}
    return msgspec.structs.replace(sent, **dropped) if dropped else sent


def _is_neutral(sent: SamplingOverrides, name: str, field: RuntimeField, supported: Collection[str]) -> bool:
    value = getattr(sent, name)
    if value is None:
        return False
    return value in field.off or (name not in supported and (field.is_detail or value in field.unnoticed))


def tokenize_bad_words(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word at the start of a text and after a space, as transformers and vLLM do.

    Raises SluiceError INVALID where a word is empty or too long, or where there are too many.
    """
    _check_bad_words(words)
    spelled = {
        tuple(tokenizer.encode_words(prefix + word.lstrip(), "bad_words")): None
        for word in words
        for prefix in ("", " ")
    }
    return tuple(spelled)


def _check_bad_words(words: tuple[str, ...]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise invalid("bad_words", f"bad_words has {len(words)} strings; at most {MAX_BAD_WORDS} are allowed")
    for index, word in enumerate(words):
        if not word.strip() or len(word) > MAX_BAD_WORD_LENGTH:
            raise invalid(
                "bad_words",
                f"bad_words[{index}] must have from 1 to {MAX_BAD_WORD_LENGTH} characters, and not spaces alone",
            )


def add_word_biases(
    tokenizer: Tokenizer, words: tuple[tuple[str, float], ...], biases: Mapping[int, float]
) -> dict[int, float]:
    """Return `biases` by token id, plus the weight of each word on each of its tokens, as NVIDIA's models do.

    Raises SluiceError INVALID for too many or too long words, and where a token's sum is out of range.
    """
    _check_biased_words(words)
    total = dict(biases)
    for word, weight in words:
        for token_id in tokenizer.encode_words(word, _BIAS_WORDS):
            total[token_id] = total.get(token_id, 0.0) + weight
    wrong = next((bias for bias in total.values() if not -MAX_BIAS <= bias <= MAX_BIAS), None)
    if wrong is not None:
        raise _bias_out_of_range(wrong)
    return total


def _check_biased_words(words: tuple[tuple[str, float], ...]) -> None:
    if len(words) > MAX_BIASED_WORDS:
        raise invalid(_BIAS_WORDS, f"{_BIAS_WORDS} has {len(words)} strings; at most {MAX_BIASED_WORDS} are allowed")
    for index, (word, _) in enumerate(words):
        if len(word) > MAX_BIASED_WORD_LENGTH:
            raise invalid(_BIAS_WORDS, f"{_BIAS_WORDS}[{index}] must have at most {MAX_BIASED_WORD_LENGTH} characters")


def _bias_out_of_range(bias: float) -> SluiceError:
    allowed = f"between {-MAX_BIAS:g} and {MAX_BIAS:g} for each token, all its words together"
    return invalid(_BIAS_WEIGHTS, f"{_BIAS_WEIGHTS} must be {allowed}, got {bias:g}")


def build_request_parameters(request: TextRequest, model: str) -> RequestParameters:
    """Return the client's sampling fields under the names of a language model's inputs (`pipelines/llm/fields.py`).

    Raises SluiceError INVALID, naming the field, for one that would not reach the language model behind `model`.
    """
    sampling = drop_neutral_fields(request.sampling, ())
    for name in _FIELDS_NOT_PASSED_ON:
        if getattr(sampling, name) is not None:
            raise _not_passed_on(name, model)
    if request.echo:
        raise _not_passed_on("echo", model)
    values = ((name, getattr(sampling, name)) for name in _PLAIN_FIELDS)
    parameters: RequestParameters = {name: value for name, value in values if value is not None}
    parameters |= _guide_parameters(sampling.grammar, model)
    config = _sampling_config(request)
    if config:
        parameters["sampling_config"] = msgspec.json.encode(config).decode()
    if request.cache_salt:
        parameters["cache_salt"] = request.cache_salt
    return parameters | {"return_num_input_tokens": True, "return_num_output_tokens": True}


def _sampling_config(request: TextRequest) -> dict[str, object]:
    """Return the fields for `sampling_config`.

    They are lists, which request parameters cannot be, and `top_k`, which is also a parameter of retrieving steps.
    """
    config = {
        "top_k": request.sampling.top_k,
        "stop_words": request.stop or None,
        "bad_words": request.bad_words or None,
        "stop_token_ids": request.sampling.stop_token_ids or None,
    }
    return {name: value for name, value in config.items() if value is not None}


def _guide_parameters(grammar: Grammar | None, model: str) -> RequestParameters:
    if grammar is None:
        return {}
    kind = _GUIDE_TYPES.get(grammar.kind)
    if kind is None:
        raise _not_passed_on("grammar", model, f"; constraints that are: {', '.join(_GUIDE_TYPES.values())}")
    guide: RequestParameters = {"guided_decoding_guide": grammar.text} if grammar.text else {}
    return {"guided_decoding_guide_type": kind} | guide


def _not_passed_on(name: str, model: str, more: str = "") -> SluiceError:
    return invalid(
        name, f"{name} is not passed on by model '{model}', whose language model is a step among others{more}"
    )
