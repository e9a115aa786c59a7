"""The parts of the C++ library that NVIDIA's Python modules need: enumerations, checks of values, responses."""

import math
from enum import Enum, IntEnum
from types import ModuleType
from typing import Any


class FinishReason(IntEnum):
    NOT_FINISHED, END_ID, STOP_WORDS, LENGTH, TIMED_OUT, CANCELLED = range(6)


class LlmRequestState(Enum):
    """States with the values of llmRequest.h: schedulers compare them."""

    UNKNOWN, ENCODER_INIT = 0, 1
    DISAGG_GENERATION_INIT, DISAGG_GENERATION_TRANS_IN_PROGRESS, CONTEXT_INIT = 8, 9, 10
    DISAGG_GENERATION_TRANS_COMPLETE, GENERATION_IN_PROGRESS, GENERATION_TO_COMPLETE = 12, 13, 14
    GENERATION_COMPLETE = 20


_ABOVE_0 = math.ulp(0.0)
_RANGES = {
    **dict.fromkeys(("beam_width", "num_return_sequences"), (1, 1024)),
    **dict.fromkeys(("top_p", "top_p_decay"), (_ABOVE_0, 1.0)),
    **dict.fromkeys(("top_p_min", "min_p"), (0.0, 1.0)),
    **dict.fromkeys(("temperature", "beam_search_diversity_rate", "length_penalty"), (0.0, math.inf)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (-math.inf, math.inf)),
    **dict.fromkeys(("top_k", "top_p_reset_ids", "min_tokens", "prompt_ignore_length"), (0, math.inf)),
    **dict.fromkeys(("early_stopping", "no_repeat_ngram_size"), (0, math.inf)),
    "repetition_penalty": (_ABOVE_0, math.inf),
    "seed": (0, 2**64 - 1),
    "beam_width_array": (),
}
"""What cpp/tensorrt_llm/executor/samplingConfig.cpp takes. Ranges from a whole number are of whole numbers."""
_OUTPUTS = (
    *("return_log_probs", "return_context_logits", "return_generation_logits", "exclude_input_from_output"),
    *("return_encoder_output", "return_perf_metrics", "additional_model_outputs"),
)


def _checked(class_name: str, names: Any) -> type:
    """Make a class that `dir` shows these fields of and no others, and that checks its arguments."""

    def check(self: Any, **values: Any) -> None:
        if unknown := values.keys() - {*names}:
            raise TypeError(f"{class_name} has no {', '.join(sorted(unknown))}")
        for name, value in values.items():
            low, high = _RANGES.get(name) or (None, None)
            if value is None or low is None:
                continue
            if not low <= value <= high or (type(low) is int and type(value) is not int):
                raise ValueError(f"{class_name} refuses {name}={value!r}")

    return type(class_name, (), dict.fromkeys(names) | {"__init__": check})


class GuidedDecodingParams:
    GuideType: Any = Enum("GuideType", "JSON JSON_SCHEMA REGEX EBNF_GRAMMAR STRUCTURAL_TAG")

    def __init__(self, guide_type: Any, guide: str | None = None) -> None:
        if (guide_type is self.GuideType.JSON) != (guide is None):
            raise ValueError(f"a guide of type {guide_type.name} with the text {guide!r}")


class Result:
    """The tokens of one response. What nobody has set is None."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update({"sequence_index": 0, "cached_tokens": 0} | values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Response:
    def __init__(self, client_id: int, result: Result) -> None:
        self.client_id = self.request_id = client_id
        self.result = result

    def has_error(self) -> bool:
        return False


def agree(sampling_config: type, sampling_params: type) -> None:
    """Take fields away that the version's SamplingParams has not: the library's own class has as many."""
    for name in _RANGES.keys() - {"beam_width", "num_return_sequences"} - {*dir(sampling_params)}:
        delattr(sampling_config, name)


def fill_executor(module: ModuleType) -> None:
    """Make `bindings.executor`. Other names of it are made on demand."""
    made = {"SamplingConfig": _checked("SamplingConfig", _RANGES), "OutputConfig": _checked("OutputConfig", _OUTPUTS)}
    vars(module).update(
        made, FinishReason=FinishReason, GuidedDecodingParams=GuidedDecodingParams, Result=Result, Response=Response
    )
