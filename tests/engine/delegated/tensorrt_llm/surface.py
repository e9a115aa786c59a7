"""The parts of TensorRT-LLM that the adapter uses beside the arguments of its classes: a list to check new versions by.

The arguments of the LLM classes are in `configuration/arguments.py` and `configuration/catalogue.py`, those of
SamplingParams in `sampling.py`. `test_contract.py` compares all of them with NVIDIA's API-stability files, and proves
that this list is complete.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import yaml

from tests.paths import DATA

STABILITY = DATA / "tensorrt_llm" / "api_stability"
STABLE_LLM = {"1.2.1": "llm.e00a1866", "1.3.0": "llm"}


def told(name: str, flavour: str) -> dict[str, Any]:
    """Return the two API-stability files of a class as one."""
    whole: dict[str, Any] = {"methods": {}, "properties": {}}
    for folder, file in (
        ("references_committed", STABLE_LLM[flavour] if name == "llm" else name),
        ("references", name),
    ):
        path = STABILITY / folder / f"{file}.yaml"
        part = yaml.safe_load(path.read_text()) if path.is_file() else {"methods": {}, "properties": {}}
        whole["properties"].update(part["properties"])
        for method, said in part["methods"].items():
            there = whole["methods"].setdefault(method, {"parameters": {}})
            there["return_annotation"] = said["return_annotation"]
            there["parameters"].update(said["parameters"])
    return whole


REQUIRED = "required"
"""Default of an argument that has none."""


class Use(Enum):
    """The adapter's use of a member."""

    GIVES = "gives"
    """It gives an argument: `type` must be one of those that are taken."""
    READS = "reads"
    """It reads a property or field: `type` is all that this may hold."""
    CALLS = "calls"
    """It calls a method: `type` is what this returns."""


@dataclass(frozen=True, slots=True)
class Member:
    """One name of one class, with its type in the words of the API-stability files."""

    owner: str
    name: str
    use: Use
    type: str
    default: object = None


_LOGPROBS = "list[dict[int, tensorrt_llm.executor.result.Logprob]]"
_PARTS = "tensorrt_llm.disaggregated_params.DisaggregatedParams"
_STREAM = "tensorrt_llm.executor.result.IterationResult"

SURFACE = (
    Member("LLM", "generate_async", Use.CALLS, "tensorrt_llm.llmapi.llm.RequestOutput"),
    Member("LLM.generate_async", "inputs", Use.GIVES, "List[int]", REQUIRED),
    Member("LLM.generate_async", "sampling_params", Use.GIVES, "tensorrt_llm.sampling_params.SamplingParams"),
    Member("LLM.generate_async", "lora_request", Use.GIVES, "tensorrt_llm.executor.request.LoRARequest"),
    Member("LLM.generate_async", "streaming", Use.GIVES, "bool", False),
    Member("LLM.generate_async", "cache_salt", Use.GIVES, "str"),
    Member("LLM.generate_async", "disaggregated_params", Use.GIVES, _PARTS),
    Member("LLM", "get_stats_async", Use.CALLS, _STREAM),
    Member("LLM.get_stats_async", "timeout", Use.GIVES, "float", 2),
    Member("LLM", "get_kv_cache_events_async", Use.CALLS, _STREAM),
    Member("LLM.get_kv_cache_events_async", "timeout", Use.GIVES, "float", 2),
    Member("LLM", "shutdown", Use.CALLS, "None"),
    Member("LLM", "tokenizer", Use.READS, "Optional[tensorrt_llm.llmapi.tokenizer.TokenizerBase]", REQUIRED),
    Member("RequestOutput", "outputs", Use.READS, "List[tensorrt_llm.executor.result.CompletionOutput]"),
    Member("RequestOutput", "finished", Use.READS, "bool"),
    Member("RequestOutput", "abort", Use.CALLS, "None"),
    Member("CompletionOutput", "token_ids", Use.READS, "Optional[List[int]]", []),
    Member(
        "CompletionOutput",
        "finish_reason",
        Use.READS,
        "Optional[Literal['stop', 'length', 'timeout', 'cancelled']]",
    ),
    Member("CompletionOutput", "stop_reason", Use.READS, "Union[int, str, NoneType]"),
    Member("CompletionOutput", "logprobs", Use.READS, f"Optional[{_LOGPROBS} | List[float]]"),
    Member("CompletionOutput", "prompt_logprobs", Use.READS, f"Optional[{_LOGPROBS}]"),
    Member(
        "CompletionOutput",
        "request_perf_metrics",
        Use.READS,
        "Optional[tensorrt_llm.bindings.executor.RequestPerfMetrics]",
    ),
    Member("CompletionOutput", "disaggregated_params", Use.READS, f"Optional[{_PARTS}]"),
    Member("GuidedDecodingParams", "json", Use.GIVES, "str"),
    Member("GuidedDecodingParams", "json_object", Use.GIVES, "bool", False),
    Member("GuidedDecodingParams", "regex", Use.GIVES, "str"),
    Member("GuidedDecodingParams", "grammar", Use.GIVES, "str"),
    Member("QuantConfig", "quant_algo", Use.GIVES, "tensorrt_llm.quantization.mode.QuantAlgo"),
)
"""Members that NVIDIA's API-stability files list."""

UNTOLD = {
    "LLM._check_health": "private; false once the executor is lost. A version without it is asked in other ways",
    "LLM._collective_rpc": "private; sleep and wakeup, with tags, where sleep_config is set. Without it, level 0 alone",
    "LLM.encode": "of 1.3 and later; its EncoderOutput's logits",
    "LLM.priority": "an argument of generate_async, of 1.3, where the waiting queue is one of priorities",
    "LLM.conversation_params": "likewise, of later versions of 1.3, for ranks of data-parallel attention",
    "llmapi.ThinkingBudgetLogitsProcessor": "of later versions of 1.3",
    "LLM._executor": "private, and its is_shutdown: where there is no _check_health",
    "LLM.input_processor": "not among the properties; the processor of images, before 1.3 called in generate_async",
    "LLM.preprocess": "came with 1.3; before, input_processor is asked itself",
    "PreprocessedInputs.multimodal_params": "and its multimodal_input and to_tensor",
    "MultimodalPlaceholderRegistry.get_placeholder": "and is_valid: without them no model takes images",
    "InputProcessor.supports_token_id_mm_expansion": "not in every version; false without it",
    "CompletionOutput.cached_tokens": "not in every version; else the reused blocks of request_perf_metrics",
    "RequestPerfMetrics.kv_cache_metrics": "and its num_reused_blocks",
    "Logprob.logprob": "a version may give the number itself",
    "LoRARequest.lora_name": "with lora_int_id and lora_path",
    "DisaggregatedParams.request_type": "and every field of a context server's answer, as it came",
    "DisaggregatedParams.first_gen_tokens": "where it is empty, the request is computed whole",
    "DisaggregatedParams.first_gen_log_probs": "without it requests for log probabilities are computed whole",
    "DisaggregatedParams.disagg_request_id": "given where the version has it",
}
"""Members that these files do not list, and what the adapter does without them."""
