"""The tensors of an LLM: one table for declaring, reading and refusing them.

Names and types are those of TensorRT-LLM's models: `tensorrt_llm` (tokens), `ensemble` and `tensorrt_llm_bls` (text);
and of Triton's vLLM backend.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from engine.types import EngineInfo
from pipelines.text.runtime_fields import RUNTIME_FIELDS


class Meaning(Enum):
    """What an input does here."""

    OBEYED = "obeyed"
    HINT = "hint"
    """It could not change the answer: any value is taken."""
    ABSENT = "absent"
    """It would change the answer in a way that is not here: only values that ask for nothing are taken."""


@dataclass(frozen=True, slots=True)
class Input:
    """An input, which a request may also give as a parameter. A scalar has dims [1].

    `alias_of` names the input that this one is another name of. `neutral` are values that ask for nothing: with an
    absent one the only ones taken, with one that is obeyed as if it had not been sent. Those that are `is_completed`
    are declared for a model that declares no inputs itself. `needs` is what an engine must have for it to be obeyed
    (one of `EngineInfo.sampling_fields`, or ADAPTERS); `meaning` is what holds at the others.
    A list that `is_sparse` is kept as its elements that are not 0, by their places.
    """

    name: str
    datatype: str
    description: str
    dims: tuple[int, ...] = (1,)
    alias_of: str = ""
    meaning: Meaning = Meaning.OBEYED
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
class Output:
    """An output; `alias_of` as for inputs. TensorRT-LLM's dims with a beam dimension have two entries."""

    name: str
    datatype: str
    description: str
    dims: tuple[int, ...] = (1,)
    alias_of: str = ""
    is_completed: bool = True

    @property
    def field(self) -> str:
        return self.alias_of or self.name


def _other(
    name: str,
    datatype: str,
    alias_of: str,
    dims: tuple[int, ...] = (1,),
    *,
    neutral: tuple[Any, ...] = (),
    is_completed: bool = True,
) -> Input:
    text = f"Another name of {alias_of}."
    return Input(name, datatype, text, dims, alias_of, neutral=neutral, is_completed=is_completed)


def _absent(name: str, datatype: str, *neutral: Any, dims: tuple[int, ...] = (1,), is_completed: bool = False) -> Input:
    return Input(name, datatype, "Not supported.", dims, "", Meaning.ABSENT, neutral, is_completed)


def _hint(name: str, datatype: str, dims: tuple[int, ...] = (1,), *, is_completed: bool = False) -> Input:
    return Input(name, datatype, "Without effect.", dims, "", Meaning.HINT, (), is_completed)


def _of_runtime(name: str, datatype: str, description: str, field: str = "", *, is_completed: bool = False) -> Input:
    """A sampling field that TensorRT-LLM has and other runtimes have not; `field` where `name` is an alias."""
    known = RUNTIME_FIELDS[field or name]
    meaning = Meaning.HINT if known.is_detail else Meaning.ABSENT
    neutral = (*known.off, *known.unnoticed)
    return Input(name, datatype, description, (1,), field, meaning, neutral, is_completed, needs=field or name)


def _of_adapter(name: str, datatype: str, description: str, neutral: Any, *, is_completed: bool = False) -> Input:
    return Input(name, datatype, description, (1,), "", Meaning.ABSENT, (neutral,), is_completed, needs=ADAPTERS)


ADAPTERS = "adapters"
"""What an engine has that was given LoRA adapters."""

PROMPTS = ("text_input", "input_ids", "messages")
"""The inputs that say what to go on from: a request has one of them."""

_TEXT = (
    Input("text_input", "BYTES", "The prompt, taken as it is: no chat template."),
    Input("messages", "BYTES", "A conversation to answer, by the chat template: OpenAI's messages, as JSON."),
    Input("stop_words", "BYTES", "Strings that end the text; they are not part of it.", (-1,)),
    _other("stop", "BYTES", "stop_words", (-1,)),
    Input("bad_words", "BYTES", "Words that must not come.", (-1,)),
)
_TOKENS = (
    Input("input_ids", "INT32", "The prompt's tokens.", (-1,)),
    Input("input_lengths", "INT32", "How many of input_ids count; all where absent."),
    Input(
        "stop_words_list", "INT32", "Token sequences that end the output: all in a row, and where each ends.", (2, -1)
    ),
    Input("bad_words_list", "INT32", "Token sequences that must not come, as stop_words_list.", (2, -1)),
    Input("pad_id", "INT32", "What shorter rows of a batch are filled with; end_id where absent."),
)
_BOTH = (
    Input("max_tokens", "INT32", "Most tokens to generate; where absent 16, with messages all that the context has."),
    _other("request_output_len", "INT32", "max_tokens"),
    Input("stream", "BOOL", "Whether tokens come as they are made (generate_stream: they do where absent)."),
    _other("streaming", "BOOL", "stream"),
    Input("sampling_config", "BYTES", 'More of these inputs by name, as a JSON object; "" is none.', neutral=("",)),
    _other("sampling_parameters", "BYTES", "sampling_config", neutral=("",)),
    Input("cache_salt", "BYTES", "Cached prefixes are shared by requests of one salt alone.", neutral=("",)),
    Input("end_id", "INT32", "The token that ends the output, in place of the model's own; -1 for none."),
    Input("exclude_input_in_output", "BOOL", "Whether the prompt is left out of the output that does not stream."),
    _other("exclude_input_from_output", "BOOL", "exclude_input_in_output", is_completed=False),
    Input("guided_decoding_guide_type", "BYTES", "json, json_schema, regex or ebnf_grammar."),
    Input("guided_decoding_guide", "BYTES", "The schema, expression or grammar that the text must match."),
    Input("temperature", "FP32", "0 to 2. Without temperature, top_k, top_p, min_p and typical_p decoding is greedy."),
    Input("top_k", "INT32", "Sample from this many most likely tokens; 0 for all."),
    _other("runtime_top_k", "INT32", "top_k"),
    Input("top_p", "FP32", "Sample from the most likely tokens that together have this probability."),
    _other("runtime_top_p", "FP32", "top_p"),
    Input("min_p", "FP32", "Sample from tokens at least this fraction as likely as the likeliest."),
    Input("typical_p", "FP32", "Sample from tokens about as likely as is to be expected; above 0, at most 1 (off)."),
    Input("seed", "UINT64", "Makes sampling repeatable."),
    _other("random_seed", "UINT64", "seed"),
    Input("repetition_penalty", "FP32", "Above 1, tokens of prompt and text become less likely."),
    Input("presence_penalty", "FP32", "-2 to 2, taken once from tokens that the text has."),
    Input("frequency_penalty", "FP32", "-2 to 2, taken for each time that the text has a token."),
    Input("embedding_bias_words", "BYTES", "Words whose tokens come more or less often.", (-1,)),
    Input("embedding_bias_weights", "FP32", "What is added to the logits of each word's tokens; -100 to 100.", (-1,)),
    Input(
        "embedding_bias",
        "FP32",
        "What is added to each token's logit, by token id; -100 to 100.",
        (-1,),
        neutral=({},),
        is_sparse=True,
    ),
    Input("min_tokens", "INT32", "Fewest tokens before the model may end the text."),
    _other("min_length", "INT32", "min_tokens"),
    Input("ignore_eos", "BOOL", "Whether to go on to max_tokens past the model's own end."),
    Input("stop_token_ids", "INT32", "Tokens that end the output; they are not part of it.", (-1,), is_completed=False),
    Input("return_log_probs", "BOOL", "Whether cum_log_probs and output_log_probs come, in a stream with its end."),
    _other("return_cumulative_logprob", "BOOL", "return_log_probs", is_completed=False),
    Input("return_num_input_tokens", "BOOL", "Whether the end carries num_input_tokens and num_cached_tokens."),
    Input("return_num_output_tokens", "BOOL", "Whether the end carries num_output_tokens."),
)
_ABSENT = (
    _of_runtime("beam_width", "INT32", "Beams of a search, whose best is the answer.", is_completed=True),
    _absent("num_return_sequences", "INT32", 1, is_completed=True),
    _of_runtime("length_penalty", "FP32", "How much a beam search prefers long texts.", is_completed=True),
    _of_runtime("len_penalty", "FP32", "Another name of length_penalty.", "length_penalty", is_completed=True),
    _absent("return_context_logits", "BOOL", False, is_completed=True),
    _absent("return_generation_logits", "BOOL", False, is_completed=True),
    _absent("return_perf_metrics", "BOOL", False, is_completed=True),
    _absent("return_kv_cache_reuse_stats", "BOOL", False),
    _absent("decoder_text_input", "BYTES", "", is_completed=True),
    _of_adapter("lora_task_id", "UINT64", "The LoRA adapter by its place, from 1; 0 for none.", 0, is_completed=True),
    _absent("best_of", "INT32", 1),
    _absent("n", "INT32", 1),
    _absent("use_beam_search", "BOOL", False),
    _absent("logprobs", "INT32"),
    _absent("prompt_logprobs", "INT32"),
    _absent("return_logprobs", "BOOL", False),
    _absent("include_stop_str_in_output", "BOOL", False),
    _absent("skip_special_tokens", "BOOL", True),
    _of_runtime("beam_search_diversity_rate", "FP32", "How different the beams of a search shall be."),
    _of_runtime("no_repeat_ngram_size", "INT32", "So many tokens in a row come once; 0 is off."),
    _of_runtime("runtime_top_p_min", "FP32", "Another name of top_p_min.", "top_p_min"),
    _of_runtime("runtime_top_p_decay", "FP32", "Another name of top_p_decay.", "top_p_decay"),
    _of_runtime("top_p_min", "FP32", "What a decaying top_p does not fall below."),
    _of_runtime("top_p_decay", "FP32", "What top_p is multiplied by at each token."),
    _absent("draft_input_ids", "INT32", dims=(-1,)),
    _absent("draft_logits", "FP32", dims=(-1, -1)),
    _absent("num_draft_tokens", "INT32", 0),
    _absent("use_draft_logits", "BOOL", False),
    _absent("encoder_input_features", "FP16", dims=(-1, -1)),
    _absent("encoder_output_lengths", "INT32", 0),
    _absent("cross_attention_mask", "BOOL", dims=(-1, -1)),
    _absent("skip_cross_attn_blocks", "BOOL", False),
    _absent("prompt_embedding_table", "FP16", dims=(-1, -1)),
    _absent("prompt_table_extra_id", "UINT64"),
    _absent("prompt_table_extra_ids", "UINT64", dims=(-1,)),
    _absent("prompt_vocab_size", "INT32", 0),
    _absent("mrope_rotary_cos_sin", "FP32", dims=(-1,)),
    _absent("mrope_position_deltas", "INT64", dims=(1,)),
    _absent("lora_weights", "FP16", dims=(-1, -1)),
    _absent("lora_config", "INT32", dims=(-1, 3)),
    _of_adapter("lora_name", "BYTES", "The LoRA adapter by its name.", ""),
    _absent("context_phase_params", "UINT8", dims=(-1,)),
    _absent("image", "BYTES", "", dims=(-1,)),
    _absent("image_input", "FP16", dims=(-1, 3, -1, -1)),
    _absent("image_bytes_input", "UINT8", dims=(-1, -1, -1, -1)),
    _absent("video_bytes_input", "UINT8", dims=(-1, -1, -1, -1)),
    _absent("image_url_input", "BYTES", ""),
    _absent("image_sizes_input", "INT64", dims=(-1, 2)),
)
_HINTS = (
    # Of encoder-decoder models, which are not served; NVIDIA's preprocessing sends its padding to any.
    _hint("decoder_input_ids", "INT32", (-1,)),
    _hint("decoder_input_lengths", "INT32"),
    _of_runtime("early_stopping", "BOOL", "Whether a beam search ends once it has enough complete beams."),
    _of_runtime("runtime_top_p_reset_ids", "INT32", "Another name of top_p_reset_ids.", "top_p_reset_ids"),
    _of_runtime("top_p_reset_ids", "INT32", "The token after which a decaying top_p begins anew."),
    _hint("draft_acceptance_threshold", "FP32"),
    _hint("lookahead_window_size", "INT32"),
    _hint("lookahead_ngram_size", "INT32"),
    _hint("lookahead_verification_set_size", "INT32"),
    _hint("return_finish_reason", "BOOL"),
    _hint("return_stop_reason", "BOOL"),
    *(_hint(f"retention_token_range_{what}", "INT32", (-1,)) for what in ("starts", "ends", "priorities")),
    _hint("retention_token_range_durations_ms", "INT32", (-1,)),
    _hint("retention_decode_priority", "INT32"),
    _hint("retention_decode_duration_ms", "INT32"),
)
STOP_REQUEST = Input("stop", "BOOL", "Whether to end the earlier requests of this id.", alias_of="stop_request")
"""What TensorRT-LLM's token model calls `stop`. The text face's are strings: the declared type tells them apart."""

INPUTS: dict[str, Input] = {each.name: each for each in (*_TEXT, *_BOTH, *_TOKENS, *_ABSENT, *_HINTS)}
"""By name; what they mean at an engine that has nothing but what every runtime has."""


def inputs_of(info: EngineInfo) -> dict[str, Input]:
    """What each input means at this engine."""
    has = {*info.sampling_fields, *((ADAPTERS,) if info.adapters else ())}
    return {name: _obeyed(each) if each.needs in has else each for name, each in INPUTS.items()}


def _obeyed(known: Input) -> Input:
    """Of a sampling field every value counts: the length penalty that changes nothing elsewhere is no default here."""
    neutral = known.neutral if known.needs == ADAPTERS else ()
    return replace(known, meaning=Meaning.OBEYED, neutral=neutral)


_NEVER = (
    *(("context_logits", "FP32", (-1, -1)), ("generation_logits", "FP32", (-1, -1, -1))),
    *((f"kv_cache_{what}", "INT32", (1,)) for what in ("alloc_new_blocks", "reused_blocks", "alloc_total_blocks")),
    *((f"{what}_time_ns", "INT64", (1,)) for what in ("arrival", "first_scheduled", "first_token", "last_token")),
    *(("acceptance_rate", "FP32", (1,)), ("context_phase_params", "UINT8", (-1,))),
    *(("total_accepted_draft_tokens", "INT32", (1,)), ("total_draft_tokens", "INT32", (1,))),
    *(("stop_reason", "BYTES", (-1,)), ("logprobs", "BYTES", (-1,))),
)
"""Outputs that a model may declare and no response has, as what asks for them is refused."""

OUTPUTS: dict[str, Output] = {
    each.name: each
    for each in (
        Output("text_output", "BYTES", "The text, or in a stream the next piece of it.", (-1,)),
        Output(
            "output_ids", "INT32", "The prompt's tokens and the generated ones; in a stream the new ones.", (-1, -1)
        ),
        Output("sequence_length", "INT32", "How many of output_ids count, for each beam.", (-1,)),
        Output("finish_reason", "BYTES", "stop or length; with the end."),
        Output("cum_log_probs", "FP32", "Log probability of all tokens generated; with the end, where asked for."),
        Output("output_log_probs", "FP32", "Of each generated token; with the end, where asked for.", (-1,)),
        Output("num_input_tokens", "INT32", "Tokens of the prompt; with the end, where asked for."),
        Output("num_cached_tokens", "INT32", "Those of the prompt that needed no computing; as num_input_tokens."),
        Output("num_output_tokens", "INT32", "Tokens generated; with the end, where asked for."),
        Output("cumulative_logprob", "FP32", "Another name of cum_log_probs.", (-1,), "cum_log_probs", False),
        Output(
            "batch_index", "INT32", "The row of the request that a row of the answer belongs to.", is_completed=False
        ),
        Output("sequence_index", "INT32", "Always 0: a row has one sequence.", is_completed=False),
        *(Output(name, datatype, "Never given.", dims, is_completed=False) for name, datatype, dims in _NEVER),
    )
}
"""By name."""
