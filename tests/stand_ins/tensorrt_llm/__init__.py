"""A stand-in for TensorRT-LLM: its public surface, and its behaviour as far as an adapter can see it.

Nothing of it is copied: classes are made from the API-stability files in tests/data/tensorrt_llm. The README beside
this folder says what it does and by which environment variables.
"""

from pathlib import Path

from ._stand_in.settings import settings

__version__ = settings().version

if __version__ == "1.2.1":  # later versions have no compiled engines
    __path__.append(str(Path(__file__).parent / "_stand_in" / "engines_only"))

from .disaggregated_params import DisaggregatedParams
from .llmapi import LLM
from .sampling_params import SamplingParams

__all__ = ["LLM", "DisaggregatedParams", "SamplingParams", "__version__"]
