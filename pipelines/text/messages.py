"""Conversations as JSON text, in the form of OpenAI's `messages`."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from pipelines.text.types import ChatMessage
from sluice.errors import invalid


class _TextPart(msgspec.Struct, frozen=True):
    type: Literal["text"]
    text: str


class _Turn(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_TextPart]

    def message(self) -> ChatMessage:
        if isinstance(self.content, str):
            return ChatMessage(self.role, self.content)
        return ChatMessage(self.role, "".join(part.text for part in self.content))


_DECODER = msgspec.json.Decoder(list[_Turn])
_ENCODER = msgspec.json.Encoder()


def decode_messages(text: str, param: str = "messages") -> tuple[ChatMessage, ...]:
    """The turns. Roles are checked where they are rendered. Raises SluiceError INVALID, which names `param`."""
    try:
        return tuple(turn.message() for turn in _DECODER.decode(text))
    except msgspec.DecodeError as error:
        form = '[{"role": "user", "content": "..."}, ...]'
        raise invalid(param, f"{param} must be a JSON array of messages, {form}: {error}") from None


def encode_messages(messages: Sequence[ChatMessage]) -> bytes:
    return _ENCODER.encode(messages)
