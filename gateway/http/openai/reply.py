"""What the two OpenAI answers have in common: chunks when streamed, one object when whole."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

from engine.errors import SluiceError
from gateway.http.errors import openai_error_body
from gateway.http.frames import HOLE, TextFrame, event_frame
from pipelines.text.types import TextEvent

DONE = b"data: [DONE]\n\n"

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished text and the event that ended it."""

    text: str
    end: TextEvent


def usage(ends: Sequence[TextEvent]) -> JsonObject:
    """OpenAI's token counts, summed over the last events of a request's streams."""
    prompt_tokens = sum(end.prompt_tokens for end in ends)
    completion_tokens = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def ending(end: TextEvent) -> JsonObject:
    """A choice's last fields. `stop_reason` is vLLM's: the stop string or token id that matched."""
    return {"finish_reason": end.finish_reason, "stop_reason": end.stop_reason}


def error_frame(error: SluiceError) -> bytes:
    """The last event of a stream that failed; no `[DONE]` follows it."""
    return b"data: " + openai_error_body(error) + b"\n\n"


class Reply(ABC):
    """The shapes of one answer: its head, and what a subclass says of its choices."""

    protocol: ClassVar[str]
    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, *, reply_id: str, created: int, model: str, num_choices: int, include_usage: bool) -> None:
        """`created` is in Unix seconds. With `include_usage` a stream ends with the token counts."""
        self._head = {"id": reply_id, "object": self.kind, "created": created, "model": model}
        self._chunk_head = {**self._head, "object": self.chunk_kind}
        self._include_usage = include_usage
        self._text_frames = [self._text_frame(index) for index in range(num_choices)]

    @abstractmethod
    def piece(self, index: int, text: str) -> JsonObject:
        """A streamed choice with more text."""

    @abstractmethod
    def last_piece(self, index: int, end: TextEvent) -> JsonObject:
        """A streamed choice that says why it ended."""

    @abstractmethod
    def choice(self, index: int, choice: Choice) -> JsonObject:
        """A whole choice."""

    def opening(self) -> bytes:
        """What a stream sends before its first text."""
        return b""

    def frame(self, index: int, event: TextEvent) -> bytes:
        """`event` of stream `index`: its text, and its end where it is the last."""
        frame = self._text_frames[index].fill(event.text) if event.text else b""
        if event.finish_reason is not None:
            frame += event_frame(self.chunk(self.last_piece(index, event)))
        return frame

    def closing(self, ends: Sequence[TextEvent]) -> bytes:
        """What a stream sends after all its choices ended as `ends`."""
        if not self._include_usage:
            return DONE
        return event_frame({**self._chunk_head, "choices": [], "usage": usage(ends)}) + DONE

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """The answer as one object."""
        shown = [self.choice(index, choice) for index, choice in enumerate(choices)]
        counts = usage([choice.end for choice in choices])
        return orjson.dumps({**self._head, "choices": shown, "usage": counts})

    def chunk(self, piece: JsonObject) -> JsonObject:
        """A stream's object with one choice."""
        chunk = {**self._chunk_head, "choices": [piece]}
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _text_frame(self, index: int) -> TextFrame:
        return TextFrame.around(self.chunk(self.piece(index, HOLE)))
