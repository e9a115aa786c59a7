"""Texts and conversations as elements of BYTES tensors: rows of texts, and OpenAI's `messages` as JSON."""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from sluice.errors import invalid
from sluice.pipelines.text.types import ChatMessage
from sluice.serving.request import InferRequest
from sluice.serving.tensors.tensor import Tensor

MAX_MESSAGES = 10_000
"""Most messages of a conversation. Making more of them holds up the event loop."""


def read_text_rows(request: InferRequest, name: str, *, is_batched: bool) -> list[list[str]]:
    """Return each row's texts in the input `name`; without a batch dimension one row. Raises INVALID without UTF-8."""
    array = request.inputs[name].array
    rows = array.reshape(array.shape[0], -1) if is_batched else array.reshape(1, -1)
    try:
        return [[element.decode() for element in row] for row in rows.tolist()]
    except UnicodeDecodeError:
        raise invalid(name, f"input '{name}' must be text in UTF-8") from None


def build_text_tensor(name: str, rows: Sequence[Sequence[bytes]], *, is_batched: bool) -> Tensor:
    """Build a tensor [rows, longest row], padded with empty elements, or [elements] without a batch dimension."""
    width = max(map(len, rows))
    array = np.full((len(rows), width), b"", np.object_)
    for padded, row in zip(array, rows, strict=True):
        padded[: len(row)] = row
    return Tensor.of(name, array if is_batched else array.reshape(width))


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
    """Decode a JSON array of messages. Roles are not checked. Raises SluiceError INVALID, naming `param`."""
    try:
        turns = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        form = '[{"role": "user", "content": "..."}, ...]'
        raise invalid(param, f"{param} must be a JSON array of messages, {form}: {error}") from None
    if len(turns) > MAX_MESSAGES:
        raise invalid(param, f"{param} must have at most {MAX_MESSAGES} messages, got {len(turns)}")
    return tuple([turn.message() for turn in turns])


def encode_messages(messages: Sequence[ChatMessage]) -> bytes:
    """Encode messages as a JSON array, for an element of a tensor or a request parameter."""
    return _ENCODER.encode(messages)
