# ruff: noqa: TID252 - importers know the package as tensorrt_llm, the type checker by its folder
from typing import Any

from .._stand_in.configurations import CONFIGURATIONS
from .._stand_in.samplers import is_since
from ..bindings.executor import KvCacheRetentionConfig
from ..disaggregated_params import DisaggregatedParams
from ..executor import CompletionOutput, LoRARequest, RequestError
from ..quantization import QuantAlgo
from ..sampling_params import GuidedDecodingParams, SamplingParams
from .llm import LLM, RequestOutput
from .llm_args import LlmArgs
from .llm_utils import CalibConfig, QuantConfig
from .thinking_budget import ThinkingBudgetLogitsProcessor

globals().update(CONFIGURATIONS)
if not is_since("1.3.0"):
    del ThinkingBudgetLogitsProcessor

__all__ = [
    "LLM",
    "CalibConfig",
    "CompletionOutput",
    "DisaggregatedParams",
    "GuidedDecodingParams",
    "KvCacheRetentionConfig",
    "LlmArgs",
    "LoRARequest",
    "QuantAlgo",
    "QuantConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    *CONFIGURATIONS,
]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
