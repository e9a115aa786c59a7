"""`GET /v1/models`: what can be asked."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pipelines.llm.text_models import AdapterText

if TYPE_CHECKING:  # heavy to import, and the server listens before it is
    from pipelines.text.model import TextModel


def model_object(model: "TextModel") -> dict[str, object]:
    """One model in OpenAI's words; `max_model_len`, in tokens, is vLLM's, and not there where nobody knows it.

    So are an adapter's `root` (its folder) and `parent` (its model).
    """
    shown = {"id": model.name, "object": "model", "created": model.created, "owned_by": "sluice"}
    longest = model.max_model_len
    if longest is not None:
        shown["max_model_len"] = longest
    return {**shown, "root": model.root, "parent": model.parent} if isinstance(model, AdapterText) else shown


def model_list(models: Iterable["TextModel"]) -> dict[str, object]:
    return {"object": "list", "data": [model_object(model) for model in models]}
