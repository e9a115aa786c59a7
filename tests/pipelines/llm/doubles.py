"""Stand-ins for a language model, where only its name, its text side or its engine matters."""

from types import SimpleNamespace
from typing import Any

from sluice.pipelines.llm.model import LlmModel


def language_model(text: Any, name: str, version: int = 1) -> LlmModel:
    """Return a model that has this text side and serves nothing."""
    model = object.__new__(LlmModel)
    spec: Any = SimpleNamespace(name=name, version=version)
    model.spec, model.text, model.engine = spec, text, text.engine
    return model
