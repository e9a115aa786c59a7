"""An LLM's text face as Triton describes models: one declaration for metadata, configuration, docs and parsing.

Names and types are those of TensorRT-LLM's text models (`ensemble`, `tensorrt_llm_bls`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # heavy to import, and the server listens before it is
    from pipelines.backends.llm.text import LlmText

PLATFORM = "llm"


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or an output. A list has dims [-1] and any number of elements, else there is one.

    `alias_of` names the input that this one is another name of.
    """

    name: str
    datatype: str
    description: str
    is_list: bool = False
    is_optional: bool = True
    alias_of: str | None = None

    @property
    def dims(self) -> list[int]:
        return [-1] if self.is_list else [1]

    @property
    def field(self) -> str:
        """The name under which the value is kept."""
        return self.alias_of or self.name


INPUTS = (
    Tensor("text_input", "BYTES", "The prompt, taken as it is: no chat template.", is_optional=False),
    Tensor("max_tokens", "INT32", "Most tokens to generate; 16 where absent."),
    Tensor("stream", "BOOL", "Whether generate_stream sends tokens as they come (it does where absent)."),
    Tensor("streaming", "BOOL", "Another name of stream.", alias_of="stream"),
    Tensor("stop_words", "BYTES", "Strings that end the text; they are not part of it.", is_list=True),
    Tensor("stop", "BYTES", "Another name of stop_words.", is_list=True, alias_of="stop_words"),
    Tensor("bad_words", "BYTES", "Words that must not come.", is_list=True),
    Tensor("guided_decoding_guide_type", "BYTES", "json, json_schema, regex or ebnf_grammar."),
    Tensor("guided_decoding_guide", "BYTES", "The schema, expression or grammar that the text must match."),
    Tensor("temperature", "FP32", "0 to 2. Without temperature, top_k, top_p, min_p and typical_p decoding is greedy."),
    Tensor("top_k", "INT32", "Sample from this many most likely tokens; 0 for all."),
    Tensor("top_p", "FP32", "Sample from the most likely tokens that together have this probability."),
    Tensor("min_p", "FP32", "Sample from tokens at least this fraction as likely as the likeliest."),
    Tensor("typical_p", "FP32", "Sample from tokens about as likely as is to be expected; above 0, at most 1 (off)."),
    Tensor("seed", "UINT64", "Makes sampling repeatable."),
    Tensor("random_seed", "UINT64", "Another name of seed.", alias_of="seed"),
    Tensor("repetition_penalty", "FP32", "Above 1, tokens of prompt and text become less likely."),
    Tensor("presence_penalty", "FP32", "-2 to 2, taken once from tokens that the text has."),
    Tensor("frequency_penalty", "FP32", "-2 to 2, taken for each time that the text has a token."),
    Tensor("min_tokens", "INT32", "Fewest tokens before the model may end the text."),
    Tensor("min_length", "INT32", "Another name of min_tokens.", alias_of="min_tokens"),
    Tensor("ignore_eos", "BOOL", "Whether to go on to max_tokens past the model's own end."),
    Tensor("return_log_probs", "BOOL", "Whether the end carries cum_log_probs and output_log_probs."),
    Tensor("return_num_input_tokens", "BOOL", "Whether the end carries num_input_tokens."),
    Tensor("return_num_output_tokens", "BOOL", "Whether the end carries num_output_tokens."),
)
OUTPUTS = (
    Tensor("text_output", "BYTES", "The text, or in a stream the next piece of it.", is_list=True),
    Tensor("finish_reason", "BYTES", "stop or length; with the end."),
    Tensor("cum_log_probs", "FP32", "Log probability of all tokens generated; with the end, where asked for."),
    Tensor("output_log_probs", "FP32", "Of each token that the text has; with the end, where asked for.", is_list=True),
    Tensor("num_input_tokens", "INT32", "Tokens of the prompt; with the end, where asked for."),
    Tensor("num_output_tokens", "INT32", "Tokens generated; with the end, where asked for."),
)

NOTHING_ASKED: dict[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    "beam_search_diversity_rate": (0, 0.0),
    "decoder_text_input": ("",),
    "embedding_bias_words": ("",),
    "embedding_bias_weights": (),
    "end_id": (),
    "exclude_input_in_output": (True,),
    "exclude_input_from_output": (True,),
    "length_penalty": (0, 0.0, 1, 1.0),
    "lora_task_id": (0,),
    "no_repeat_ngram_size": (0,),
    "num_return_sequences": (1,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_perf_metrics": (False,),
}
"""Inputs of TensorRT-LLM that would change the answer and are not here, with the values that ask for nothing.

Triton would pass an unknown name on as a request parameter, and ignoring one of these would silently
give another answer than was asked for.
"""


def metadata(model: "LlmText") -> dict[str, Any]:
    """`GET /v2/models/{name}`."""
    return {
        "name": model.name,
        "versions": [model.version],
        "platform": PLATFORM,
        "inputs": [_metadata_of(tensor) for tensor in INPUTS],
        "outputs": [_metadata_of(tensor) for tensor in OUTPUTS],
    }


def config(model: "LlmText") -> dict[str, Any]:
    """`GET /v2/models/{name}/config`: a ModelConfig as protobuf's JSON has it."""
    return {
        "name": model.name,
        "platform": "",
        "backend": PLATFORM,
        "runtime": "",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [_input_config(tensor) for tensor in INPUTS],
        "output": [_output_config(tensor) for tensor in OUTPUTS],
        "batch_input": [],
        "batch_output": [],
        "instance_group": [{"name": model.name, "kind": "KIND_MODEL", "count": 1, "gpus": []}],
        "default_model_filename": "",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {key: {"string_value": str(value)} for key, value in _parameters(model).items()},
        "model_warmup": [],
        "model_transaction_policy": {"decoupled": True},
    }


def _parameters(model: "LlmText") -> dict[str, str | int]:
    """What the engine decided at load: TensorRT-LLM's names where it has one, else vLLM's."""
    info = model.info
    return {
        "batching_strategy": "V1" if info.scheduler_policy == "static_batch" else "inflight_fused_batching",
        "batch_scheduler_policy": info.scheduler_policy,
        "max_tokens_in_paged_kv_cache": info.num_blocks * info.block_size,
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "runtime": info.runtime,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "kv_cache_dtype": info.kv_cache_dtype,
    }


def _metadata_of(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.dims}


def _input_config(tensor: Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "data_type": _config_type(tensor),
        "format": "FORMAT_NONE",
        "dims": tensor.dims,
        "is_shape_tensor": False,
        "allow_ragged_batch": False,
        "optional": tensor.is_optional,
        "is_non_linear_format_io": False,
    }


def _output_config(tensor: Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "data_type": _config_type(tensor),
        "dims": tensor.dims,
        "label_filename": "",
        "is_shape_tensor": False,
        "is_non_linear_format_io": False,
    }


def _config_type(tensor: Tensor) -> str:
    return "TYPE_STRING" if tensor.datatype == "BYTES" else f"TYPE_{tensor.datatype}"
