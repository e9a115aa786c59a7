"""`GET /v1/models`: what can be asked."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # heavy to import, and the server listens before it is
    from pipelines.backends.llm.text import LlmText


def model_object(model: "LlmText") -> dict[str, object]:
    """One model in OpenAI's words; `max_model_len`, in tokens, is vLLM's."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "sluice",
        "max_model_len": model.max_model_len,
    }


def model_list(models: Iterable["LlmText"]) -> dict[str, object]:
    return {"object": "list", "data": [model_object(model) for model in models]}
