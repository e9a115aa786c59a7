"""The shape of answers that have blocks besides text: thinking and tool uses."""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import pydantic_core

from sluice.engine.types import FinishReason
from sluice.gateway.api.anthropic.messages import MessageReply, ending_of, named_event
from sluice.pipelines.text.parts import AnswerText, CallArguments, CallStart, ChatReader, Part
from sluice.pipelines.text.types import TextEvent

_TEXT, _THINKING, _TOOL_USE = "text", "thinking", "tool_use"
_SIGNATURE_BYTES = 24


class BlocksReply(MessageReply):
    """Formats an answer as the blocks that `reader` finds in its text."""

    def __init__(self, reply_id: str, model: str, reader: ChatReader) -> None:
        super().__init__(reply_id, model)
        self._reader = reader
        self._blocks = _Blocks()

    def whole(self, events: Sequence[TextEvent]) -> bytes:
        content: list[dict[str, Any]] = []
        pieces: list[str] = []
        parts = [part for event in events for part in self._reader.read(event)]
        for kind, payload in self._blocks.read(parts, is_last=True):
            if kind == "content_block_start":
                content.append(payload["content_block"])
                pieces = []
            elif kind == "content_block_delta" and "signature" in payload["delta"]:
                content[-1]["signature"] = payload["delta"]["signature"]
            elif kind == "content_block_delta":
                pieces.append(next(text for name, text in payload["delta"].items() if name != "type"))
            else:
                _fill(content[-1], "".join(pieces))
        return self.message(content, events[-1], self._ending(events[-1]))

    def frame(self, event: TextEvent) -> bytes:
        frame = b"" if self._has_begun else self.opening(event)
        self._has_begun = True
        is_last = event.finish_reason is not None
        payloads = self._blocks.read(self._reader.read(event), is_last=is_last)
        frame += b"".join([named_event({"type": kind, **payload}) for kind, payload in payloads])
        return frame + (self.closing(event, self._ending(event)) if is_last else b"")

    def _ending(self, end: TextEvent) -> dict[str, str | None]:
        ending = ending_of(end)
        if self._blocks.has_tool_use and end.finish_reason is FinishReason.STOP:
            ending["stop_reason"] = "tool_use"
        return ending


class _Blocks:
    """Makes the events of an answer's blocks from its parts."""

    def __init__(self) -> None:
        self.has_tool_use = False
        self._kind = ""
        """Type of the open block; "" for none."""
        self._index = -1
        self._thoughts = blake2b(digest_size=_SIGNATURE_BYTES)

    def read(self, parts: Sequence[Part], *, is_last: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the type and the rest of each event."""
        for part in parts:
            if isinstance(part, CallStart):
                block = {"type": _TOOL_USE, "id": part.id, "name": part.name, "input": {}}
                yield from self._open(_TOOL_USE, block)
                self.has_tool_use = True
            elif isinstance(part, CallArguments):
                yield self._delta({"type": "input_json_delta", "partial_json": part.text})
            elif isinstance(part, AnswerText):
                if self._kind != _TEXT:
                    yield from self._open(_TEXT, {"type": _TEXT, "text": ""})
                yield self._delta({"type": "text_delta", "text": part.text})
            else:
                if self._kind != _THINKING:
                    yield from self._open(_THINKING, {"type": _THINKING, "thinking": "", "signature": ""})
                self._thoughts.update(part.text.encode(errors="surrogatepass"))
                yield self._delta({"type": "thinking_delta", "thinking": part.text})
        if is_last:
            yield from self._close()

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from self._close()
        self._kind, self._index = kind, self._index + 1
        yield "content_block_start", {"index": self._index, "content_block": block}

    def _close(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._kind == _THINKING:
            # Clients send thoughts back only with a signature. Nothing here checks it.
            yield self._delta({"type": "signature_delta", "signature": self._thoughts.hexdigest()})
        if self._kind:
            yield "content_block_stop", {"index": self._index}
        self._kind = ""

    def _delta(self, delta: dict[str, str]) -> tuple[str, dict[str, Any]]:
        return "content_block_delta", {"index": self._index, "delta": delta}


def _fill(block: dict[str, Any], text: str) -> None:
    """Put the joined text of a block's deltas into it. What of an input was cut off is left out, as in Anthropic's own
    clients."""
    if block["type"] == _TOOL_USE:
        block["input"] = pydantic_core.from_json(text or "{}", allow_partial="trailing-strings")
    else:
        block[block["type"]] = text
