"""Which text model a name means: one of the repository, or `base:adapter`, one of its LoRA adapters."""

from collections.abc import Collection, Iterable, Iterator

from pipelines.llm.adapter import SEPARATOR, adapted, adapters_of, no_adapter
from pipelines.llm.model import llm_text_of
from pipelines.text.model import TextModel
from pipelines.text.tensor_text import text_model_of
from serving.model import Model
from sluice.errors import ErrorCode, SluiceError


def split_name(name: str, models: Collection[str]) -> tuple[str, str]:
    """The model and its adapter, "" for none. Raises NOT_FOUND, in OpenAI's way, where no model is meant."""
    if name in models:
        return name, ""
    base = max((each for each in models if name.startswith(each + SEPARATOR)), key=len, default=None)
    if base is None or name == base + SEPARATOR:
        available = ", ".join(dict.fromkeys(models)) or "none"
        raise SluiceError(ErrorCode.NOT_FOUND, f"model {name!r} not found; available: {available}", param="model")
    return base, name[len(base) + 1 :]


def chosen(model: Model, adapter: str) -> TextModel:
    """What answers for `model`, which is known to answer conversations, with `adapter` where it names one.

    Raises NOT_FOUND for an adapter that the model does not have.
    """
    if adapter:
        text = llm_text_of(model)
        if text is None:
            raise no_adapter(model.name, adapter)
        return adapted(text, adapter)
    found = text_model_of(model)
    assert found is not None
    return found


def with_adapters(models: Iterable[Model]) -> Iterator[TextModel]:
    """Everything that conversations can be held with: each model in its last version, and that version's adapters."""
    answering = {model.name: (model, text) for model in models if (text := text_model_of(model)) is not None}
    for model, text in answering.values():
        yield text
        own = llm_text_of(model)
        if own is not None:
            yield from adapters_of(own)
