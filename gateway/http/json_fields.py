"""TODO."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag


def is_tag(part: str | int) -> bool:
    """Whether a part of an error's location is the name of a union's member, not of a field."""
    return isinstance(part, str) and part.startswith("<")


def text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


def expected(what: str) -> dict[str, str]:
    """What a union says of a value that is none of its members."""
    return {"custom_error_type": "expected", "custom_error_message": f"Input should be {what}"}


class RequestObject(BaseModel):
    """A JSON object. Fields that it does not declare are kept, for `parsing` to judge."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)


StopStrings = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[str], Field(fail_fast=True), Tag("<list>")],
    Discriminator(text_or_list, **expected("a string or an array of strings")),
]


class TextPart(RequestObject):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag("<list>")],
    Discriminator(text_or_list, **expected('a string or an array of {"type": "text", "text": ...} parts')),
]


class Message(RequestObject):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)
