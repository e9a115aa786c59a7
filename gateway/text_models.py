"""Which text model a name means: one of the repository, or `base:adapter`, one of its LoRA adapters."""

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from engine.errors import ErrorCode, SluiceError
from pipelines.backends.llm.adapter import SEPARATOR, adapted, adapters_of, no_adapter

if TYPE_CHECKING:  # all are heavy to import, and the server listens before they are
    from pipelines.inference.model import Model
    from pipelines.text.model import TextModel


def split_name(name: str, models: Collection[str]) -> tuple[str, str]:
    """The model and its adapter, "" for none. Raises NOT_FOUND, in OpenAI's way, where no model is meant."""
    if name in models:
        return name, ""
    base = max((each for each in models if name.startswith(each + SEPARATOR)), key=len, default=None)
    if base is None or name == base + SEPARATOR:
        available = ", ".join(dict.fromkeys(models)) or "none"
        raise SluiceError(ErrorCode.NOT_FOUND, f"model {name!r} not found; available: {available}", param="model")
    return base, name[len(base) + 1 :]


def chosen(model: "Model", adapter: str) -> "TextModel":
    """What answers for `model`, which is known to answer conversations, with `adapter` where it names one.

    Raises NOT_FOUND for an adapter that the model does not have.
    """
    if adapter:
        if model.text is None:
            raise no_adapter(model.name, adapter)
        return adapted(model.text, adapter)
    assert model.chat is not None
    return model.chat


def with_adapters(models: Iterable["Model"]) -> Iterator["TextModel"]:
    """Everything that conversations can be held with: each model in its last version, and that version's adapters."""
    answering = {model.name: (model, chat) for model in models if (chat := model.chat) is not None}
    for model, chat in answering.values():
        yield chat
        if model.text is not None:
            yield from adapters_of(model.text)
