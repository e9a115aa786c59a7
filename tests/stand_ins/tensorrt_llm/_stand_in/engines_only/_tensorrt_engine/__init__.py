"""The class for compiled engines. It is on the package's path only in the versions that have it."""

from tensorrt_llm.llmapi.llm import EngineLLM as LLM

__all__ = ["LLM"]
