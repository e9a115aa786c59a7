from .request import LoRARequest, PromptAdapterRequest
from .result import CompletionOutput, GenerationResult, IterationResult, Logprob
from .utils import RequestError

__all__ = [
    "CompletionOutput",
    "GenerationResult",
    "IterationResult",
    "LoRARequest",
    "Logprob",
    "PromptAdapterRequest",
    "RequestError",
]
