"""`POST /v1/messages`: its prompt, and the shape of its answers."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec
import orjson

from engine.types import FinishReason, Grammar, GrammarKind
from gateway.http.anthropic.schemas import CountTokensRequest, MessagesRequest, TextBlock, Turn
from gateway.http.errors import anthropic_error_body
from gateway.http.sse import PLACEHOLDER, TextFrame, event_frame
from pipelines.text.types import ChatMessage, Conversation, TextEvent, TextRequest
from sluice.errors import SluiceError, invalid

PROTOCOL = "anthropic_messages"
PARAM_NAMES = {"stop": "stop_sequences", "grammar": "output_config.format.schema", "query": "messages"}
"""The client's names of fields that models name otherwise in their errors."""
_BETWEEN_TURNS = "\n\n"
"""Joins the texts of turns that one role has in a row: they are one turn, as with Anthropic."""


def parse_conversation(fields: CountTokensRequest) -> tuple[ChatMessage, ...]:
    """Return the turns, the system's first. Raises INVALID for what this server cannot do."""
    _refuse_tools_and_thinking(fields)
    if fields.messages[-1].role == "assistant":
        place = f"messages[{len(fields.messages) - 1}].role"
        raise invalid(place, f"{place} must be 'user', got 'assistant': this server cannot continue a begun answer")
    system = fields.system if isinstance(fields.system, str) else _join_blocks(fields.system or ())
    turns = [
        ChatMessage(role, _BETWEEN_TURNS.join(map(_text, turns)))
        for role, turns in groupby(fields.messages, key=lambda turn: turn.role)
    ]
    return (ChatMessage("system", system), *turns) if system else tuple(turns)


def _refuse_tools_and_thinking(fields: CountTokensRequest) -> None:
    if fields.tools:
        raise invalid("tools", f"tools are not supported, got {len(fields.tools)}; leave them out")
    if fields.thinking is not None and fields.thinking.type == "enabled":
        raise invalid("thinking.type", "thinking.type must be 'disabled' or 'adaptive', got 'enabled': no model thinks")


def _text(turn: Turn) -> str:
    return turn.content if isinstance(turn.content, str) else _join_blocks(turn.content)


def _join_blocks(blocks: Sequence[object]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))


def parse_messages_request(fields: MessagesRequest, base: TextRequest) -> TextRequest:
    """Return the request for the answer. `base` has what every route reads alike: id, protocol and scheduling."""
    sampling: dict[str, Any] = {"max_tokens": fields.max_tokens}
    sampling |= {name: getattr(fields, name) for name in ("temperature", "top_k", "top_p")}
    if fields.output_config is not None and fields.output_config.format is not None:
        schema = json.dumps(fields.output_config.format.schema_, ensure_ascii=False)
        sampling["grammar"] = Grammar(GrammarKind.JSON_SCHEMA, schema)
    return msgspec.structs.replace(
        base,
        prompt=Conversation(parse_conversation(fields)),
        sampling={name: value for name, value in sampling.items() if value is not None},
        stop=tuple(fields.stop_sequences or ()),
    )


class MessageReply:
    """Formats one answer, streamed as Anthropic's named events or whole."""

    def __init__(self, reply_id: str, model: str) -> None:
        self._head = {"id": f"msg_{reply_id}", "type": "message", "role": "assistant", "model": model}
        delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": PLACEHOLDER}}
        self._text_frame = TextFrame.around(delta, name="content_block_delta")
        self._has_begun = False

    def whole(self, text: str, end: TextEvent) -> bytes:
        """Return the answer as one object."""
        blocks = [{"type": "text", "text": text}] if text else []
        return orjson.dumps({**self._head, "content": blocks, **_ending(end), "usage": _usage(end)})

    def frame(self, event: TextEvent) -> bytes:
        """Return the frames of an event: the opening before the first one, its text, and the closing at the end."""
        frame = b"" if self._has_begun else self._opening(event)
        self._has_begun = True
        if event.text:
            frame += self._text_frame.fill(event.text)
        if event.finish_reason is not None:
            frame += _event({"type": "content_block_stop", "index": 0})
            frame += _event({"type": "message_delta", "delta": _ending(event), "usage": _usage(event)})
            frame += _event({"type": "message_stop"})
        return frame

    def _opening(self, event: TextEvent) -> bytes:
        usage = {**_usage(event), "output_tokens": 0}
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return _event({"type": "message_start", "message": message}) + _event(block)


def _event(payload: dict[str, Any]) -> bytes:
    return event_frame(payload, payload["type"])


def error_frame(error: SluiceError) -> bytes:
    """Return the last event of a stream that failed; no `message_stop` follows it."""
    return b"event: error\ndata: " + anthropic_error_body(error) + b"\n\n"


def _ending(end: TextEvent) -> dict[str, str | None]:
    if end.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(end.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(event: TextEvent) -> dict[str, int]:
    """Return Anthropic's counts, of which the prompt's tokens are those that were not in the prefix cache."""
    return {
        "input_tokens": event.prompt_tokens - event.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": event.cached_tokens,
        "output_tokens": event.completion_tokens,
    }
