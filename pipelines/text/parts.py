"""The parts of a chat model's answer: text, reasoning and tool calls, and the reader that finds them in its text."""

from typing import Protocol

import msgspec

from sluice.pipelines.text.types import TextEvent


class AnswerText(msgspec.Struct, frozen=True, gc=False):
    """A piece of the answer's text."""

    text: str


class ReasoningText(msgspec.Struct, frozen=True, gc=False):
    """A piece of the reasoning before the answer."""

    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a tool call. Calls are numbered from 0 in an answer."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Part = AnswerText | ReasoningText | CallStart | CallArguments


class ChatReader(Protocol):
    """Finds the parts of one answer. The joined parts never depend on how the text was split. Only the answer's task
    uses it."""

    @property
    def finds_reasoning(self) -> bool:
        """Whether the model reasons, in a format that the reader knows."""
        ...

    @property
    def num_reasoning_tokens(self) -> int:
        """How many of the answer's tokens are reasoning, without the marks around it; known after the last event."""
        ...

    @property
    def relaxed(self) -> list[str]:
        """What the schemas of the tools say and calls are not held to, each with its place."""
        ...

    def read(self, event: TextEvent) -> list[Part]:
        """Return the parts that an event of the answer completes, all that is left with the last event."""
        ...

    def feed(self, text: str) -> list[Part]:
        """Return the parts that more text completes. Text that may still become another part is kept back."""
        ...

    def finish(self) -> list[Part]:
        """Return the parts of the text kept back, at the end of the text."""
        ...
