"""The interface of everything that generates text: language models, their adapters, and pipelines around them."""

from functools import cache, singledispatch
from hashlib import blake2b
from importlib.metadata import version
from typing import Protocol

import msgspec

from sluice.engine.client.stream import Consumer
from sluice.errors import invalid
from sluice.pipelines.text.types import (
    AS_IT_IS,
    ChatMessage,
    ChatReader,
    Conversation,
    ImagePart,
    Prompt,
    PromptForm,
    TextEvent,
    TextRequest,
)
from sluice.serving.model import Model

MAX_SESSION_CHARS = 64 << 10
"""Characters by which sessions are told apart: a header has no more."""
IMAGE_PLACEHOLDER = "[image]"
"""Stands for an image of an earlier message, for a model that takes text alone."""
UNCOUNTED_IMAGES = " here: how many tokens an image takes is known when an answer to it is generated"


class TextModel(Protocol):
    """A language model, or a pipeline of models with one at its end. Used on the event loop's thread."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def created(self) -> int:
        """When the model was made, in seconds since 1970."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt + output, in tokens; None where it is not known."""
        ...

    @property
    def max_beam_width(self) -> int:
        """Most beams of a beam search; 1 where beam search is not supported."""
        ...

    @property
    def parent(self) -> str | None:
        """Name of the model that this is an adapter of; None for a model that is not an adapter."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the engine is dead; None while it lives, and for models without an engine of their own."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes with the model, its version and the settings that its answers depend on."""
        ...

    @property
    def template_names(self) -> frozenset[str]:
        """Names that its chat template refers to, variables among them."""
        ...

    @property
    def max_images(self) -> int:
        """Most images of a prompt; 0 for a model that takes text alone."""
        ...

    @property
    def takes_parameters(self) -> bool:
        """Whether a request may have `parameters`, because steps before the language model may read them."""
        ...

    def adapt(self, conversation: Conversation) -> Conversation:
        """Return a conversation as the model takes it, with notes of what is not as it was. Raises INVALID for images
        in the user's last message that the model cannot take."""
        ...

    async def prepare_shared(self, prompt: Prompt, form: PromptForm = AS_IT_IS) -> Prompt:
        """Return the prompt with the work done that several requests for it share. Raises INVALID."""
        ...

    def chat_reader(self, request: TextRequest) -> ChatReader | None:
        """Return a reader of one answer to `request`, in the formats of the model; None where the answer is text alone,
        without tools in the request and for a model without a format of reasoning. Raises INVALID for tools that the
        model cannot take, naming the field."""
        ...

    async def generate(self, request: TextRequest, consumer: Consumer[TextEvent]) -> None:
        """Generate text, and push it to `consumer`. The last event has the finish reason. Cancelling the coroutine
        cancels the request. A retrieval comes in an event of its own, before the first text.

        Raises SluiceError before the first event where the request is refused, and after it where it failed.
        """
        ...


def fingerprint_of(*facts: object) -> str:
    """Return a short name of the server's version and of `facts`, in OpenAI's form."""
    text = repr((_server_version(), *facts))
    return f"fp_{blake2b(text.encode(), digest_size=5).hexdigest()}"


def digest_session(tenant: str, session: str) -> str:
    """Return an engine's name for a tenant's session: short, and without what the client wrote. "" for none. Of a long
    name the beginning counts: it may have megabytes."""
    name = f"{tenant}\0{session[:MAX_SESSION_CHARS]}"
    return blake2b(name.encode(), digest_size=8).hexdigest() if session else ""


@cache
def _server_version() -> str:
    return version("sluice")


def refuse_parameters(model: str, request: TextRequest) -> None:
    """Raise SluiceError INVALID (param "parameters") where `request` has any, for a model that takes none."""
    if request.parameters:
        names = ", ".join(request.parameters)
        reason = f"a language model alone, which retrieves nothing and takes none of {names}; name a pipeline"
        raise invalid("parameters", f"model '{model}' is {reason}, or leave them out")


def refuse_images(conversation: Conversation, where: str) -> None:
    """Raise SluiceError INVALID, naming the first, where a conversation has images. `where` ends the message."""
    if images := conversation.images:
        raise invalid(images[0].path, f"{images[0].path} is not supported{where}")


def leave_out_images(conversation: Conversation, where: str) -> Conversation:
    """Return a conversation without the images of its earlier messages, and with notes of them. Raises INVALID for one
    in the user's last message. `where` ends the messages."""
    images = conversation.images
    if not images:
        return conversation
    last = max(index for index, message in enumerate(conversation.messages) if message.role == "user")
    new = [part for part in conversation.messages[last].parts if isinstance(part, ImagePart)]
    if new:
        raise invalid(new[0].path, f"{new[0].path} is not supported{where}")
    messages = tuple([_without_images(message) if message.parts else message for message in conversation.messages])
    notes = [f"{image.path} is left out{where}" for image in images]
    return msgspec.structs.replace(conversation, messages=messages, notes=(*conversation.notes, *notes))


def _without_images(message: ChatMessage) -> ChatMessage:
    text = "".join(part if isinstance(part, str) else IMAGE_PLACEHOLDER for part in message.parts)
    return msgspec.structs.replace(message, content=text, parts=())


def may_generate(model: Model) -> bool:
    """Whether a request to `model` may make a language model generate, as far as is known: what a Python model asks is
    known once it has asked."""
    return text_model_of(model) is not None or model.calls_models or any(map(may_generate, model.step_models))


@singledispatch
def text_model_of(model: Model) -> TextModel | None:
    """Return the text model behind a served model, None where it does not generate text. Each kind of model registers
    its answer where it is defined, `pipelines/text/tensor_model.py` that for every other kind."""
    return None
