"""From our sampling parameters to TensorRT-LLM's, field by field."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.delegated.tensorrt_llm.folder import ModelFolder
from engine.delegated.tensorrt_llm.library import Library, field_names
from engine.delegated.tensorrt_llm.sampling import values
from engine.delegated.tensorrt_llm.sampling.grammars import grammar_kinds
from engine.delegated.tensorrt_llm.sampling.values import Asked
from engine.types import GenerateRequest, SamplingParams
from sluice.errors import ErrorCode, SluiceError, invalid

__all__ = ["FIELDS", "SamplingField", "grammar_kinds", "sampling_params"]


@dataclass(frozen=True, slots=True)
class SamplingField:
    """One field of TensorRT-LLM's SamplingParams: what it is made of, or why it is left alone."""

    name: str
    ours: str
    """Our field, "" for none."""
    note: str = ""
    value: Callable[[Asked], Any] | None = None
    """None: the field is never given. A value of None leaves the field at its default."""
    default: Any = None
    """What the library holds where nothing is given; a test compares."""
    is_optional: bool = False
    """Whether a version that lacks it is lived with."""


def sampling_params(
    library: Library,
    request: GenerateRequest,
    folder: ModelFolder,
    backend: str | None,
    ignored: frozenset[str] = frozenset(),
) -> Any:
    """`tensorrt_llm.SamplingParams` for a request; what was generated before (`resume_token_ids`) counts.

    `ignored` are our fields that the model's sampler would not act on (`LlmPlan.ignored_sampling`).
    Raises SluiceError INVALID, naming the field, for what TensorRT-LLM cannot do.
    """
    cls = library.llmapi.SamplingParams
    asked = Asked(request, folder, backend, field_names(cls), ignored)
    _check(asked, library)
    given = _given(asked, library)
    if "guided_decoding" in given:
        given["guided_decoding"] = library.llmapi.GuidedDecodingParams(**given["guided_decoding"])
    try:
        return cls(**given)
    except ValueError as error:
        raise invalid("sampling", f"TensorRT-LLM {library.version} refuses the sampling parameters: {error}") from error


def _given(asked: Asked, library: Library) -> dict[str, Any]:
    """Values by field, where they are not the default."""
    values = [(field, field.value(asked)) for field in FIELDS if field.value is not None]
    given = {field.name: value for field, value in values if value is not None and field.name in asked.known}
    for field, value in values:
        if value is not None and field.name not in given and not field.is_optional:
            message = f"TensorRT-LLM {library.version} has no {field.name}, which {field.ours or 'every request'} needs"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param=field.ours or None)
    return given


def _check(asked: Asked, library: Library) -> None:
    params = asked.params
    if params.typical_p != 1.0:
        raise invalid(
            "typical_p", f"typical_p must be 1, since TensorRT-LLM has no such filter, got {params.typical_p}"
        )
    for word in params.bad_words:
        if len(word) > 1:
            raise _longer(word)
    default = SamplingParams()
    for name in sorted(asked.ignored & set(SamplingParams.__struct_fields__)):
        if getattr(params, name) != getattr(default, name) and name != "bad_words":
            raise _ignored(name, library)


def _longer(word: tuple[int, ...]) -> SluiceError:
    return invalid(
        "bad_words",
        "bad_words must be of one token each, also after a space: TensorRT-LLM bans single tokens. One of them has the "
        f"tokens {', '.join(map(str, word))}; leave it out, or ban one of these by a logit_bias of -100",
    )


def _ignored(name: str, library: Library) -> SluiceError:
    return invalid(
        name,
        f"{name} has no effect in the sampler of TensorRT-LLM {library.version} that this model runs with; start it "
        "with the setting sampler_type=TRTLLMSampler, or use TensorRT-LLM 1.3",
    )


_IDS_ONLY = "ids come in and go out; text is made of them outside of the engine"
_NOT_OFFERED = "no API of ours has it"

FIELDS = (
    SamplingField("max_tokens", "max_tokens", "less what was generated before a resume", values.max_tokens, default=32),
    SamplingField("min_tokens", "min_tokens", "less what was generated before a resume", values.min_tokens),
    SamplingField("n", "", "1: each of several answers is a request of its own", default=1),
    SamplingField("best_of", "beam_width", "for a beam search", values.beam_width),
    SamplingField(
        "use_beam_search",
        "beam_width",
        "above 1",
        lambda asked: True if asked.params.beam_width > 1 else None,
        default=False,
    ),
    SamplingField("beam_width_array", "", _NOT_OFFERED),
    SamplingField("end_id", "", "the model's first end of sequence; -1 with ignore_eos", values.end_id),
    SamplingField(
        "pad_id",
        "",
        "the model's first end of sequence, else 0",
        lambda asked: asked.folder.eos_token_ids[0] if asked.folder.eos_token_ids else 0,
    ),
    SamplingField(
        "seed",
        "seed",
        "drawn where none is given",
        lambda asked: None if asked.is_greedy else values.seed(asked.params),
    ),
    SamplingField("temperature", "temperature", "0 is top_k 1 without a temperature", values.temperature),
    SamplingField("top_k", "top_k", "1 where temperature is 0; 0 is all", values.top_k),
    SamplingField("top_p", "top_p", "not with temperature 0", values.unless_greedy(lambda params: params.top_p)),
    SamplingField("top_p_min", "top_p_min", "", values.ours("top_p_min")),
    SamplingField("top_p_reset_ids", "top_p_reset_ids", "", values.ours("top_p_reset_ids")),
    SamplingField("top_p_decay", "top_p_decay", "", values.ours("top_p_decay")),
    SamplingField(
        "min_p", "min_p", "not with temperature 0", values.unless_greedy(lambda params: params.min_p or None)
    ),
    SamplingField(
        "repetition_penalty", "repetition_penalty", "counts prompt and output", values.unless("repetition_penalty", 1)
    ),
    SamplingField("presence_penalty", "presence_penalty", "", values.unless("presence_penalty", 0)),
    SamplingField("frequency_penalty", "frequency_penalty", "", values.unless("frequency_penalty", 0)),
    SamplingField(
        "prompt_ignore_length",
        "presence_penalty, frequency_penalty",
        "the prompt's length, so that they count output only; a version without it counts the prompt too",
        values.prompt_ignore_length,
        is_optional=True,
    ),
    SamplingField("length_penalty", "length_penalty", "of a beam search", values.ours("length_penalty")),
    SamplingField(
        "beam_search_diversity_rate",
        "beam_search_diversity_rate",
        "of a beam search",
        values.ours("beam_search_diversity_rate"),
    ),
    SamplingField("early_stopping", "early_stopping", "of a beam search", values.ours("early_stopping")),
    SamplingField("no_repeat_ngram_size", "no_repeat_ngram_size", "", values.ours("no_repeat_ngram_size")),
    SamplingField("stop", "", "stop strings are found in our own text, and the request is cancelled"),
    SamplingField(
        "stop_token_ids", "stop_token_ids", "and the model's further ends of sequence", values.stop_token_ids
    ),
    SamplingField(
        "include_stop_str_in_output",
        "",
        "true: a token that ends an output is part of it",
        values.always(value=True),
        default=False,
    ),
    SamplingField("bad", "", "words are token ids here"),
    SamplingField("bad_token_ids", "bad_words", "those of one token; longer ones are refused", values.bad_token_ids),
    SamplingField("logits_processor", "", _NOT_OFFERED),
    SamplingField("apply_batched_logits_processor", "", _NOT_OFFERED, default=False),
    SamplingField("embedding_bias", "logit_bias", "and bad_words where the sampler has none", values.embedding_bias),
    SamplingField("guided_decoding", "grammar", "in the words of guided_decoding_backend", values.guided_decoding),
    SamplingField("lookahead_config", "", "the model's own is used"),
    SamplingField(
        "ignore_eos", "ignore_eos", "said by end_id -1: newer versions would drop stop_token_ids with it", default=False
    ),
    SamplingField("detokenize", "", f"false: {_IDS_ONLY}", values.always(value=False), default=True),
    SamplingField("add_special_tokens", "", _IDS_ONLY, default=True),
    SamplingField("truncate_prompt_tokens", "", "a prompt that is too long is refused"),
    SamplingField("skip_special_tokens", "", _IDS_ONLY, default=True),
    SamplingField("spaces_between_special_tokens", "", _IDS_ONLY, default=True),
    SamplingField("logprobs", "logprobs", "at least 1 before 1.3", values.logprobs),
    SamplingField(
        "prompt_logprobs", "prompt_logprobs", "at least 1 before 1.3; not after a resume", values.prompt_logprobs
    ),
    SamplingField("logprobs_mode", "", "its default, RAW: before penalties, temperature and filters", default="RAW"),
    SamplingField("return_context_logits", "", _NOT_OFFERED, default=False),
    SamplingField("return_generation_logits", "", _NOT_OFFERED, default=False),
    SamplingField("exclude_input_from_output", "", "true", values.always(value=True), default=True),
    SamplingField("return_encoder_output", "", _NOT_OFFERED, default=False),
    SamplingField(
        "return_perf_metrics", "", "true: cached tokens are read from them", values.always(value=True), default=False
    ),
    SamplingField("additional_model_outputs", "", _NOT_OFFERED),
)
"""Every field of TensorRT-LLM's SamplingParams."""
