"""The interface of an API, and what several of them share."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from sluice.load.config import Workload

Prompt = str | list[int]
Fetch = Callable[[str], Awaitable[bytes]]
"""Gets a path of the server and returns the body. Raises `RunError` where the server does not answer 200."""


class Framing(StrEnum):
    """The framings that separate the events of an answer."""

    SSE = "sse"
    JSON_LINES = "json_lines"
    WHOLE = "whole"
    """The body is the one event, and no token event: such an answer has an E2E but no TTFT."""


class Extra(StrEnum):
    """The parts of requests besides a prompt, each named by its option."""

    TURNS = "--turns"
    IMAGES = "--images"
    TOOLS = "--tools"
    JSON_SCHEMA = "--json-schema"


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """An earlier turn of a conversation."""

    prompt: str
    images: tuple[str, ...]
    answer: str
    response_id: str | None = None
    """The name under which the server keeps the turn; None where it keeps none."""


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The parts of a request besides its prompt: the turns before it, and PNG images in base64."""

    history: tuple[AskedTurn, ...] = ()
    images: tuple[str, ...] = ()


NO_CONTEXT = ApiContext()


@dataclass(frozen=True, slots=True)
class AskedRequest:
    """The content of one request. `prompt` is a text or token ids; `max_tokens` bounds the answer."""

    model: str
    prompt: Prompt
    max_tokens: int
    workload: Workload
    context: ApiContext = NO_CONTEXT

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields that make the answer greedy, and as long as asked where the workload wants that."""
        return {"temperature": 0.0, **({"ignore_eos": True} if self.workload.ignore_eos else {})}


@dataclass(frozen=True, slots=True)
class CallPart:
    """A piece of a tool call: its place among the calls of the answer, the name if it is here, new arguments."""

    place: int
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedEvent:
    """The content of one event."""

    has_text: bool = False
    """It is a token event, one with text. A role, a finish reason or usage alone is no token event."""
    num_tokens: int | None = None
    """Tokens of this event alone, where the server counts them."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """Tokens of the whole answer so far, where the server counts them."""
    finish_reason: str | None = None
    error: str | None = None
    is_last: bool = False
    """A complete stream ends with this event."""
    text: str | None = None
    """The text itself, without reasoning, from an API that keeps answers."""
    calls: tuple[CallPart, ...] = ()
    """The pieces of tool calls, from an API that keeps answers."""
    response_id: str | None = None
    has_sources: bool = False
    """It has the result of a retrieval."""


TOKEN = ParsedEvent(has_text=True)
"""The content of nearly every event, made once."""


class Api(ABC):
    """An API of a server."""

    route: ClassVar[str]
    """The path, with the model's name as `{model}` where the path has it."""
    event: ClassVar[Any]
    """The struct of an event's JSON."""
    framing: ClassVar[Framing] = Framing.SSE
    has_terminator: ClassVar[bool] = True
    """A complete stream has a last event of its own: `[DONE]`, or one that `parse` says is the last."""
    has_output_tokens: ClassVar[bool] = True
    """Answers have a requested number of tokens, which complete ones then must have."""
    takes: ClassVar[frozenset[Extra]] = frozenset()
    """The parts that bodies can have besides a prompt."""
    keeps_answers: bool = False
    """`parse` returns texts and tool calls too, which costs time."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(self.event).decode

    def path(self, model: str) -> str:
        return self.route.format(model=model)

    def body(
        self, model: str, prompt: Prompt, max_tokens: int, workload: Workload, context: ApiContext = NO_CONTEXT
    ) -> bytes:
        """Encode a request. The workload's own fields replace the API's."""
        asked = AskedRequest(model, prompt, max_tokens, workload, context)
        return msgspec.json.encode(self.fields(asked) | workload.extra_body)

    @abstractmethod
    def fields(self, asked: AskedRequest) -> dict[str, Any]:
        """Return the fields of a request's JSON."""

    @abstractmethod
    def parse(self, data: bytes) -> ParsedEvent:
        """Parse an event's data. Raises `ValueError` where it is not this API's."""

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Return the headers that each request needs besides those of JSON."""
        return ()

    async def prepare(self, fetch: Fetch, model: str, workload: Workload) -> None:
        """Learn from the server what bodies need, before the first request. Most need nothing."""
        return


def error_message(error: object) -> str:
    """Return the message of an `error` member: OpenAI's is an object, Triton's a string."""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def conversation(prompt: Prompt, context: ApiContext, content: Callable[[Prompt, tuple[str, ...]], Any]) -> list[Any]:
    """Return the messages of a conversation. `content` makes that of a user's message from its text and images."""
    messages: list[Any] = []
    for turn in context.history:
        messages.append({"role": "user", "content": content(turn.prompt, turn.images)})
        messages.append({"role": "assistant", "content": turn.answer})
    return [*messages, {"role": "user", "content": content(prompt, context.images)}]


def content_parts(picture: Callable[[str], Any], text_type: str = "text") -> Callable[[Prompt, tuple[str, ...]], Any]:
    """Return a function that makes a user message's content: its text, behind a part for each image, if it has any.

    `picture` makes the part of a PNG in base64.
    """

    def content(prompt: Prompt, images: tuple[str, ...]) -> Any:
        return [*map(picture, images), {"type": text_type, "text": prompt}] if images else prompt

    return content
