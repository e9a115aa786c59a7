"""A LoRA adapter of a language model as a text model of its own: `base:adapter`."""

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import msgspec

from pipelines.text.types import PlainPrompt, Prompt, TextEvent, TextRequest
from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:
    from pipelines.llm.text import LlmText

SEPARATOR = ":"


class AdapterText:
    """The model with one of its adapters; the engine that runs both is the same."""

    takes_parameters = False
    is_measured = False

    def __init__(self, base: "LlmText", adapter: str) -> None:
        self._base = base
        self._adapter = adapter

    @property
    def name(self) -> str:
        return f"{self._base.name}{SEPARATOR}{self._adapter}"

    @property
    def parent(self) -> str:
        return self._base.name

    @property
    def root(self) -> str:
        """The adapter's folder; its name where the engine found it by itself."""
        return self._base.engine.config.lora_modules.get(self._adapter, self._adapter)

    @property
    def version(self) -> str:
        return self._base.version

    @property
    def created(self) -> int:
        return self._base.created

    @property
    def max_model_len(self) -> int:
        return self._base.max_model_len

    @property
    def max_beam_width(self) -> int:
        return self._base.max_beam_width

    @property
    def failure(self) -> str | None:
        return self._base.failure

    async def prepare_shared(self, prompt: PlainPrompt) -> Prompt:
        return await self._base.prepare_shared(prompt)

    def generate(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        return self._base.generate(msgspec.structs.replace(request, adapter=self._adapter))


def adapters_of(text: "LlmText") -> list[AdapterText]:
    """In the engine's order."""
    return [AdapterText(text, adapter) for adapter in text.info.adapters]


def adapted(text: "LlmText", adapter: str) -> AdapterText:
    """`text` with its adapter of that name. Raises NOT_FOUND, naming those that there are."""
    if adapter not in text.info.adapters:
        raise no_adapter(text.name, adapter, text.info.adapters)
    return AdapterText(text, adapter)


def no_adapter(model: str, adapter: str, available: tuple[str, ...] = ()) -> SluiceError:
    listed = ", ".join(available) or "none"
    message = f"model {model!r} has no LoRA adapter {adapter!r}; available: {listed}"
    return SluiceError(ErrorCode.NOT_FOUND, message, param="model")
