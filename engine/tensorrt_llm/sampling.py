"""From our sampling parameters to TensorRT-LLM's, field by field."""

from typing import Any

from engine.tensorrt_llm.folder import ModelFolder
from engine.tensorrt_llm.library import Library
from engine.types import GenerateRequest, GrammarKind

SAMPLING_FIELDS = (
    "beam_width",
    "length_penalty",
    "early_stopping",
    "beam_search_diversity_rate",
    "no_repeat_ngram_size",
    "top_p_min",
    "top_p_decay",
    "top_p_reset_ids",
)
"""Those of `engine.types.SamplingParams` that our own executor does not have."""


def grammar_kinds(backend: str | None) -> tuple[GrammarKind, ...]:
    """Languages of constraints that a guided decoding backend (xgrammar, llguidance; None: none) keeps to."""
    raise NotImplementedError


def sampling_params(library: Library, request: GenerateRequest, folder: ModelFolder, backend: str | None) -> Any:
    """`tensorrt_llm.SamplingParams` for a request; what was generated before (`resume_token_ids`) counts.

    Raises SluiceError INVALID, naming the field, for what TensorRT-LLM cannot do.
    """
    raise NotImplementedError
