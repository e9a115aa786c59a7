"""The tensors of an LLM: one table by which they are declared, read and refused. Names and types are those of
TensorRT-LLM's `tensorrt_llm` (tokens), `ensemble`, `tensorrt_llm_bls` and `llmapi` (text), and of Triton's vLLM
backend."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from sluice.engine.sampling_fields import SAMPLING_FIELDS, SamplingField
from sluice.engine.types import EngineInfo

ADAPTERS = "adapters"
"""The feature of an engine with LoRA adapters, in `LlmInput.needs`."""
IMAGES = "images"
"""The feature of an engine whose prompts may have images."""

PROMPTS = ("text_input", "input_ids", "messages")
"""The inputs that carry a prompt. A request has exactly one of them."""


class InputSupport(Enum):
    """How an input is treated."""

    SUPPORTED = "supported"
    IGNORED = "ignored"
    """No value could change the answer, so any is accepted."""
    UNSUPPORTED = "unsupported"
    """A value could change the answer, so only neutral values are accepted."""


@dataclass(frozen=True, slots=True)
class LlmInput:
    """An input, which a request may also send as a parameter. A scalar has dims [1].

    `alias_of` is the input that this one is another name of. `neutral` values ask for nothing: an unsupported input
    accepts only these, and a supported one is treated as if it had not been sent. `is_completed` inputs are declared
    for a model that declares no inputs itself. `needs` is the feature of an engine that the input depends on (one of
    `EngineInfo.sampling_fields`, ADAPTERS or IMAGES); `support` applies to engines without it. An `is_sparse` list is
    kept as its elements that are not 0, by index.
    """

    name: str
    datatype: str
    description: str
    dims: tuple[int, ...] = (1,)
    alias_of: str = ""
    support: InputSupport = InputSupport.SUPPORTED
    neutral: tuple[Any, ...] = ()
    is_completed: bool = True
    needs: str = ""
    is_sparse: bool = False

    @property
    def field(self) -> str:
        """The name under which the value is kept."""
        return self.alias_of or self.name

    @property
    def is_list(self) -> bool:
        return self.dims != (1,)


@dataclass(frozen=True, slots=True)
class LlmOutput:
    """An output. TensorRT-LLM's dims with beams have two entries. Shared fields are explained in `LlmInput`."""

    name: str
    datatype: str
    description: str
    dims: tuple[int, ...] = (1,)
    alias_of: str = ""
    is_completed: bool = True

    @property
    def field(self) -> str:
        return self.alias_of or self.name


def _alias(
    name: str,
    datatype: str,
    alias_of: str,
    dims: tuple[int, ...] = (1,),
    *,
    neutral: tuple[Any, ...] = (),
    is_completed: bool = True,
) -> LlmInput:
    text = f"Another name of {alias_of}."
    return LlmInput(name, datatype, text, dims, alias_of, neutral=neutral, is_completed=is_completed)


def _unsupported(
    name: str, datatype: str, *neutral: Any, dims: tuple[int, ...] = (1,), is_completed: bool = False
) -> LlmInput:
    return LlmInput(name, datatype, "Not supported.", dims, "", InputSupport.UNSUPPORTED, neutral, is_completed)


def _ignored(name: str, datatype: str, dims: tuple[int, ...] = (1,), *, is_completed: bool = False) -> LlmInput:
    return LlmInput(name, datatype, "Without effect.", dims, "", InputSupport.IGNORED, (), is_completed)


def _sampling_inputs(field: SamplingField) -> Iterator[LlmInput]:
    """Yield the inputs of a sampling field: its own, and one for each other name."""
    support, needs = InputSupport.SUPPORTED, ""
    if field.is_optional:
        support = InputSupport.IGNORED if field.is_detail else InputSupport.UNSUPPORTED
        needs = field.name
    known = LlmInput(
        field.name,
        field.datatype,
        f"{field.help} {field.tensor_help}".rstrip(),
        (1,) if field.kind.is_scalar else (-1,),
        support=support,
        neutral=(*field.off, *field.neutral) if field.is_optional else (),
        is_completed=field.is_declared,
        needs=needs,
    )
    yield known
    for alias in field.aliases:
        yield replace(known, name=alias, alias_of=field.name, description=f"Another name of {field.name}.")


def _adapter_field(name: str, datatype: str, description: str, neutral: Any, *, is_completed: bool = False) -> LlmInput:
    return LlmInput(
        name, datatype, description, (1,), "", InputSupport.UNSUPPORTED, (neutral,), is_completed, needs=ADAPTERS
    )


_TEXT = (
    LlmInput("text_input", "BYTES", "The prompt, taken as it is: no chat template."),
    LlmInput("messages", "BYTES", "A conversation to answer, by the chat template: OpenAI's messages, as JSON."),
    LlmInput("stop_words", "BYTES", "Strings that end the text; they are not part of it.", (-1,)),
    _alias("stop", "BYTES", "stop_words", (-1,)),
    LlmInput("bad_words", "BYTES", "Words that must not come.", (-1,)),
)
_TOKENS = (
    LlmInput("input_ids", "INT32", "The prompt's tokens.", (-1,)),
    LlmInput("input_lengths", "INT32", "How many of input_ids count; all where absent."),
    LlmInput(
        "stop_words_list", "INT32", "Token sequences that end the output: all in a row, and where each ends.", (2, -1)
    ),
    LlmInput("bad_words_list", "INT32", "Token sequences that must not come, as stop_words_list.", (2, -1)),
    LlmInput("pad_id", "INT32", "What shorter rows of a batch are filled with; end_id where absent."),
)
_BOTH = (
    LlmInput("stream", "BOOL", "Whether tokens come as they are made (generate_stream: they do where absent)."),
    _alias("streaming", "BOOL", "stream"),
    LlmInput("sampling_config", "BYTES", 'More of these inputs by name, as a JSON object; "" is none.', neutral=("",)),
    _alias("sampling_parameters", "BYTES", "sampling_config", neutral=("",)),
    LlmInput("cache_salt", "BYTES", "Cached prefixes are shared by requests of one salt alone.", neutral=("",)),
    LlmInput("end_id", "INT32", "The token that ends the output, in place of the model's own; -1 for none."),
    LlmInput("exclude_input_in_output", "BOOL", "Whether the prompt is left out of the output that does not stream."),
    _alias("exclude_input_from_output", "BOOL", "exclude_input_in_output", is_completed=False),
    LlmInput("guided_decoding_guide_type", "BYTES", "json, json_schema, regex or ebnf_grammar."),
    LlmInput("guided_decoding_guide", "BYTES", "The schema, expression or grammar that the text must match."),
    LlmInput("embedding_bias_words", "BYTES", "Words whose tokens come more or less often.", (-1,)),
    LlmInput(
        "embedding_bias_weights", "FP32", "What is added to the logits of each word's tokens; -100 to 100.", (-1,)
    ),
    LlmInput(
        "embedding_bias",
        "FP32",
        "What is added to each token's logit, by token id; -100 to 100.",
        (-1,),
        neutral=({},),
        is_sparse=True,
    ),
    LlmInput("return_log_probs", "BOOL", "Whether cum_log_probs and output_log_probs come, in a stream with its end."),
    _alias("return_cumulative_logprob", "BOOL", "return_log_probs", is_completed=False),
    LlmInput("return_num_input_tokens", "BOOL", "Whether the end carries num_input_tokens and num_cached_tokens."),
    LlmInput("return_num_output_tokens", "BOOL", "Whether the end carries num_output_tokens."),
    LlmInput("num_return_sequences", "INT32", "Sequences to generate, each with responses of its own."),
    LlmInput("return_perf_metrics", "BOOL", "Whether each response carries the metrics of its sequence."),
    LlmInput("return_stop_reason", "BOOL", "Whether the end carries stop_reason.", is_completed=False),
    LlmInput("return_context_logits", "BOOL", "Whether context_logits come, in a stream with its end."),
    LlmInput("return_generation_logits", "BOOL", "Whether generation_logits come with the tokens."),
)
_SAMPLING = tuple(each for field in SAMPLING_FIELDS.values() if field.datatype for each in _sampling_inputs(field))
_IMAGE_URL = "Images of the question in text_input, which then is a chat's: data: URLs, or on allowed hosts."
_UNSUPPORTED = (
    _unsupported("decoder_text_input", "BYTES", "", is_completed=True),
    _adapter_field(
        "lora_task_id", "UINT64", "The LoRA adapter by its place, from 1; 0 for none.", 0, is_completed=True
    ),
    _unsupported("best_of", "INT32", 1),
    _unsupported("n", "INT32", 1),
    _unsupported("use_beam_search", "BOOL", False),
    _unsupported("logprobs", "INT32"),
    _unsupported("prompt_logprobs", "INT32"),
    _unsupported("thinking_token_budget", "INT32", -1),
    _unsupported("return_logprobs", "BOOL", False),
    _unsupported("include_stop_str_in_output", "BOOL", False),
    _unsupported("skip_special_tokens", "BOOL", True),
    _unsupported("draft_input_ids", "INT32", dims=(-1,)),
    _unsupported("draft_logits", "FP32", dims=(-1, -1)),
    _unsupported("num_draft_tokens", "INT32", 0),
    _unsupported("use_draft_logits", "BOOL", False),
    _unsupported("encoder_input_features", "FP16", dims=(-1, -1)),
    _unsupported("encoder_output_lengths", "INT32", 0),
    _unsupported("cross_attention_mask", "BOOL", dims=(-1, -1)),
    _unsupported("skip_cross_attn_blocks", "BOOL", False),
    _unsupported("prompt_embedding_table", "FP16", dims=(-1, -1)),
    _unsupported("prompt_table_extra_id", "UINT64"),
    _unsupported("prompt_table_extra_ids", "UINT64", dims=(-1,)),
    _unsupported("prompt_vocab_size", "INT32", 0),
    _unsupported("mrope_rotary_cos_sin", "FP32", dims=(-1,)),
    _unsupported("mrope_position_deltas", "INT64", dims=(1,)),
    _unsupported("lora_weights", "FP16", dims=(-1, -1)),
    _unsupported("lora_config", "INT32", dims=(-1, 3)),
    _adapter_field("lora_name", "BYTES", "The LoRA adapter by its name.", ""),
    _adapter_field("lora_id", "UINT64", "A client's number of the adapter, beside lora_name, which decides.", 0),
    _adapter_field("lora_path", "BYTES", "The folder of the adapter that lora_name names.", ""),
    _unsupported("lora_ckpt_source", "BYTES", "hf", ""),
    _unsupported("context_phase_params", "UINT8", dims=(-1,)),
    _unsupported("image", "BYTES", "", dims=(-1,)),
    _unsupported("image_input", "FP16", dims=(-1, 3, -1, -1)),
    _unsupported("image_bytes_input", "UINT8", dims=(-1, -1, -1, -1)),
    _unsupported("video_bytes_input", "UINT8", dims=(-1, -1, -1, -1)),
    _unsupported("image_url_input", "BYTES", ""),
    replace(_unsupported("image_url", "BYTES", "", dims=(-1,)), description=_IMAGE_URL, needs=IMAGES),
    _unsupported("sampling_param_logits_post_processor_name", "BYTES", ""),
    _unsupported("image_sizes_input", "INT64", dims=(-1, 2)),
)
_IGNORED = (
    # Inputs of encoder-decoder models, which are not served. NVIDIA's preprocessing sends padding for them anyway.
    _ignored("decoder_input_ids", "INT32", (-1,)),
    _ignored("decoder_input_lengths", "INT32"),
    _ignored("draft_acceptance_threshold", "FP32"),
    _ignored("lookahead_window_size", "INT32"),
    _ignored("lookahead_ngram_size", "INT32"),
    _ignored("lookahead_verification_set_size", "INT32"),
    _ignored("return_kv_cache_reuse_stats", "BOOL"),  # deprecated there, and without effect
    _ignored("return_finish_reason", "BOOL"),
    *(_ignored(f"retention_token_range_{what}", "INT32", (-1,)) for what in ("starts", "ends", "priorities")),
    _ignored("retention_token_range_durations_ms", "INT32", (-1,)),
    _ignored("retention_decode_priority", "INT32"),
    _ignored("retention_decode_duration_ms", "INT32"),
)
STOP_REQUEST = LlmInput("stop", "BOOL", "Whether to end the earlier requests of this id.", alias_of="stop_request")
"""The input `stop` of TensorRT-LLM's token model. Its type tells it from the stop strings of the same name."""

LLM_API_PREFIX = "sampling_param_"
"""Begins the names of the sampling inputs of NVIDIA's llmapi model, which are fields of the LLM class's parameters."""
_LLM_API_FIELDS = (
    *("best_of", "temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "max_tokens", "stop"),
    *("seed", "exclude_input_from_output", "return_perf_metrics"),
)


def _with_llm_api_names(inputs: dict[str, LlmInput]) -> dict[str, LlmInput]:
    """Return the inputs with the llmapi model's names of them, which are not declared for other models."""
    found = dict(inputs)
    for field in _LLM_API_FIELDS:
        known, name = inputs[field], f"{LLM_API_PREFIX}{field}"
        text = f"Another name of {known.field}."
        found[name] = replace(known, name=name, alias_of=known.field, description=text, is_completed=False)
    return found


INPUTS: dict[str, LlmInput] = _with_llm_api_names(
    {each.name: each for each in (*_TEXT, *_SAMPLING, *_BOTH, *_TOKENS, *_UNSUPPORTED, *_IGNORED)}
)
"""Inputs by name, as supported by an engine without any feature that not all runtimes have."""


def supported_inputs(info: EngineInfo, *, takes_adapters: bool) -> dict[str, LlmInput]:
    """Return the inputs by name, as this engine supports them; `takes_adapters` says whether some may come yet. Fields
    that its sampler refuses are passed on: the engine's check has the reason and what can be done."""
    adapters = (ADAPTERS,) if info.adapters or takes_adapters else ()
    images = (IMAGES,) if info.image_placeholders else ()
    features = {*info.sampling_fields, *info.refused_sampling, *adapters, *images}
    return {name: _as_supported(each) if each.needs in features else each for name, each in INPUTS.items()}


def _as_supported(known: LlmInput) -> LlmInput:
    """Return the input as supported. Every value of a sampling field counts then, also one neutral elsewhere."""
    neutral = known.neutral if known.needs == ADAPTERS else ()
    return replace(known, support=InputSupport.SUPPORTED, neutral=neutral)


_NEVER_SENT = (
    ("context_phase_params", "UINT8", (-1,)),
    ("logprobs", "BYTES", (-1,)),
)
"""Outputs that a model may declare and that no response has, because requests for them are refused."""

_METRICS = (
    ("kv_cache_alloc_new_blocks", "INT32", "KV blocks that were not in the prefix cache."),
    ("kv_cache_reused_blocks", "INT32", "KV blocks found in the prefix cache."),
    ("kv_cache_alloc_total_blocks", "INT32", "KV blocks of the prompt and of the tokens so far."),
    ("kv_cache_missed_block", "INT32", "KV blocks of the prompt that were not in the prefix cache."),
    ("kv_cache_hit_rate", "FP32", "The part of the prompt's KV blocks that was in the prefix cache."),
    ("arrival_time_ns", "INT64", "When the request came, on a clock that only grows."),
    ("first_scheduled_time_ns", "INT64", "When the engine admitted it."),
    ("first_token_time_ns", "INT64", "When its first token came."),
    ("last_token_time_ns", "INT64", "When its last token so far came."),
    ("acceptance_rate", "FP32", "The part of the draft tokens that was accepted; 0 without drafts."),
    ("total_accepted_draft_tokens", "INT32", "Draft tokens that were accepted."),
    ("total_draft_tokens", "INT32", "Draft tokens that were proposed."),
)
OUTPUTS: dict[str, LlmOutput] = {
    each.name: each
    for each in (
        LlmOutput("text_output", "BYTES", "The text, or in a stream the next piece of it.", (-1,)),
        LlmOutput(
            "output_ids", "INT32", "The prompt's tokens and the generated ones; in a stream the new ones.", (-1, -1)
        ),
        LlmOutput("sequence_length", "INT32", "How many of output_ids count, for each beam.", (-1,)),
        LlmOutput("finish_reason", "BYTES", "stop or length; with the end."),
        LlmOutput("cum_log_probs", "FP32", "Log probability of all tokens generated; with the end, on request."),
        LlmOutput("output_log_probs", "FP32", "Log probability of each token; with the end, on request.", (-1,)),
        LlmOutput("num_input_tokens", "INT32", "Tokens of the prompt; with the end, on request."),
        LlmOutput(
            "num_cached_tokens", "INT32", "Tokens of the prompt found in the prefix cache; with num_input_tokens."
        ),
        LlmOutput("num_output_tokens", "INT32", "Tokens generated; with the end, on request."),
        LlmOutput("cumulative_logprob", "FP32", "Another name of cum_log_probs.", (-1,), "cum_log_probs", False),
        LlmOutput(
            "batch_index",
            "INT32",
            "The row of a response, where there are several.",
            is_completed=False,
        ),
        LlmOutput("sequence_index", "INT32", "The place of a response's sequence, where a row has several."),
        LlmOutput(
            "context_logits",
            "FP32",
            "The logits behind each token of the prompt; on request.",
            (-1, -1),
            is_completed=False,
        ),
        LlmOutput(
            "generation_logits",
            "FP32",
            "The logits that each generated token was chosen by, also one that ended the text; on request.",
            (-1, -1, -1),
            is_completed=False,
        ),
        LlmOutput(
            "stop_reason",
            "BYTES",
            "The stop string or token id that ended the output, else None; with the end, on request.",
            is_completed=False,
        ),
        *(LlmOutput(name, datatype, f"{text} On request.", is_completed=False) for name, datatype, text in _METRICS),
        LlmOutput(
            "kv_cache_reused_block",
            "INT32",
            "Another name of kv_cache_reused_blocks.",
            alias_of="kv_cache_reused_blocks",
            is_completed=False,
        ),
        *(LlmOutput(name, datatype, "Never given.", dims, is_completed=False) for name, datatype, dims in _NEVER_SENT),
    )
}
"""Outputs by name."""
