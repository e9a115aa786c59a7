"""The installed TensorRT-LLM: its version, and the classes that the adapter uses of it. The only importer of it."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from packaging.version import Version

from engine.runtimes import ModelFormat


@dataclass(frozen=True, slots=True)
class Library:
    """What is installed."""

    version: Version
    llmapi: ModuleType
    """`tensorrt_llm.llmapi`: the config classes and SamplingParams."""

    def llm_class(self, model: ModelFormat) -> Any:
        """The class that runs a folder of this format: PyTorch's, or `_tensorrt_engine.LLM` for what is compiled.

        Raises SluiceError UNIMPLEMENTED, naming the versions that can, where this one cannot (1.3 has no engines).
        """
        raise NotImplementedError


def load_library() -> Library:
    """Import it. Raises SluiceError UNAVAILABLE with the reason where it cannot be."""
    raise NotImplementedError
