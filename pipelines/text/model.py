"""What chat completions and retrieval-augmented answers call: anything that generates text."""

from collections.abc import AsyncGenerator
from typing import Protocol

from pipelines.text.types import PlainPrompt, Prompt, TextEvent, TextRequest
from sluice.errors import invalid


class TextModel(Protocol):
    """A language model, or a pipeline of models with one at its end. Used on the event loop's thread."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def created(self) -> int:
        """In seconds since 1970."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt + output, in tokens; None where nobody knows."""
        ...

    @property
    def max_beam_width(self) -> int:
        """Most beams of a beam search; 1 where there is none."""
        ...

    @property
    def parent(self) -> str | None:
        """The model that this is an adapter of; None for what is no adapter."""
        ...

    @property
    def failure(self) -> str | None:
        """Why its engine is dead; None while it is not, or where others have to tell."""
        ...

    @property
    def takes_parameters(self) -> bool:
        """Whether a request may have `parameters`: there are steps before the language model that read them."""
        ...

    @property
    def is_measured(self) -> bool:
        """Whether what runs behind it measures each request: then its caller must not, as it would count twice."""
        ...

    async def prepare_shared(self, prompt: PlainPrompt) -> Prompt:
        """The prompt of several requests, with what is the same for all of them worked out. Raises INVALID."""
        ...

    def generate(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """Generate; the last event has the finish reason. Closing the generator cancels.

        What was retrieved for the answer comes in an event of its own, before the first text.
        Raises SluiceError at the first event where the request is refused, at a later one where it failed.
        """
        ...


def refuse_parameters(model: str, request: TextRequest) -> None:
    """For one that takes none: raises SluiceError INVALID (param "parameters") where `request` has any."""
    if request.parameters:
        names = ", ".join(request.parameters)
        reason = f"a language model alone, which retrieves nothing and takes none of {names}; name a pipeline"
        raise invalid("parameters", f"model '{model}' is {reason}, or leave them out")
