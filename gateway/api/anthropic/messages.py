"""Anthropic's messages: their routes, the request of an answer, and the answer as blocks, streamed or whole."""

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import orjson
import pydantic_core
from fastapi import APIRouter, Request, Response

from sluice.engine.types import FinishReason, Grammar, GrammarKind
from sluice.errors import SluiceError, invalid
from sluice.gateway.api.anthropic.prompt import parse_conversation
from sluice.gateway.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from sluice.gateway.api.fields import json_text
from sluice.gateway.api.translators import Answering, Reply, Translator, count_prompt, read_sampling
from sluice.gateway.front.http.bodies import json_response, read_fields
from sluice.gateway.front.http.errors import anthropic_error_body
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.parsing import refuse_foreign
from sluice.gateway.front.http.sse import PLACEHOLDER, EventStreamResponse, TextFrame, event_frame
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.types import AnswerText, CallArguments, CallStart, ChatReader, Part, TextEvent, TextRequest

PARAM_NAMES = {"stop": "stop_sequences", "grammar": "output_config.format.schema", "query": "messages"}
"""The client's names of fields that models name otherwise in their errors."""
_TEXT, _THINKING, _TOOL_USE = "text", "thinking", "tool_use"
_SIGNATURE_BYTES = 24


def router(plane: Plane, config: ServeConfig, answering: Answering) -> APIRouter:
    """Return the routes under /v1/messages, which answer from `plane`."""
    api = APIRouter(prefix="/v1/messages", tags=["Anthropic"], default_response_class=Response)
    answering.serve(api, "", "messages", "Answer a conversation.", MessagesRequest, MessagesTranslator)

    @api.post("/count_tokens", openapi_extra=describe_body(CountTokensRequest))
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a conversation's prompt."""
        fields, headers = await read_fields(request, CountTokensRequest, config.http)
        conversation, _ = parse_conversation(fields)
        model = plane.llm(fields.model)
        reader = model.chat_reader(TextRequest(request_id="", prompt=conversation))
        _check_thinking(fields, model, reader)
        return json_response({"input_tokens": await count_prompt(model, conversation, PARAM_NAMES)}, headers=headers)

    return api


def _check_thinking(fields: CountTokensRequest, model: TextModel, reader: ChatReader | None) -> None:
    """Raise INVALID where the client asks for thoughts and the model has none."""
    is_on = fields.thinking is not None and fields.thinking.type == "enabled"
    if is_on and not (reader is not None and reader.finds_reasoning):
        reason = f"model '{model.name}' does not reason"
        raise invalid("thinking.type", f"thinking.type must be 'disabled' or 'adaptive', got 'enabled': {reason}")


class MessageStreamResponse(EventStreamResponse):
    """Streams messages; what keeps the connection alive is Anthropic's own event."""

    keep_alive_frame = event_frame({"type": "ping"}, "ping")


def error_frame(error: SluiceError) -> bytes:
    """Return the last event of a stream that failed; no `message_stop` follows it."""
    return b"event: error\ndata: " + anthropic_error_body(error) + b"\n\n"


class MessagesTranslator(Translator[MessagesRequest]):
    """A conversation to answer with a message."""

    protocol = "anthropic_messages"
    stream_type = MessageStreamResponse
    encode_error = staticmethod(error_frame)

    def __init__(self, fields: MessagesRequest, request: Request) -> None:
        super().__init__(fields, request)
        self.param_names = PARAM_NAMES

    @property
    def model_name(self) -> str:
        return self.fields.model

    @property
    def priority(self) -> int | None:
        return self.fields.priority

    @property
    def session(self) -> str | None:
        return None if self.fields.metadata is None else self.fields.metadata.user_id

    def parse(self, base: TextRequest) -> list[TextRequest]:
        fields = self.fields
        refuse_foreign(fields)
        grammar = None
        if fields.output_config is not None and fields.output_config.format is not None:
            grammar = Grammar(GrammarKind.JSON_SCHEMA, json_text(fields.output_config.format.schema_))
        conversation, choice = parse_conversation(fields)
        request = msgspec.structs.replace(
            base,
            prompt=conversation,
            tool_choice=choice,
            sampling=read_sampling(fields, max_tokens=fields.max_tokens, grammar=grammar),
            stop=tuple(fields.stop_sequences or ()),
            bad_words=tuple(fields.bad_words or ()),
        )
        return [request]

    def check(self, model: TextModel, readers: Sequence[ChatReader]) -> None:
        _check_thinking(self.fields, model, readers[0] if readers else None)

    def reply(self, model: TextModel, readers: Sequence[ChatReader]) -> Reply:
        return MessageReply(self.request_id, model.name, readers[0] if readers else None)

    @property
    def is_streamed(self) -> bool:
        return bool(self.fields.stream)


class MessageReply(Reply):
    """Formats an answer as the blocks that `reader` finds in its text; None: as a block of text."""

    def __init__(self, reply_id: str, model: str, reader: ChatReader | None) -> None:
        self._head = {"id": f"msg_{reply_id}", "type": "message", "role": "assistant", "model": model}
        self._reader = reader
        self._has_begun = False
        self._has_tool_use = False
        self._kind = ""
        """Type of the open block; "" for none."""
        self._index = -1
        self._text_frame = TextFrame(b"", b"")
        """The frame of more text, where the open block is of text."""
        self._thoughts = blake2b(digest_size=_SIGNATURE_BYTES)
        self._content: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        """The text of the last block of `_content`, as far as it is collected."""
        self._end: TextEvent

    def frame(self, index: int, event: TextEvent) -> bytes:
        if self._reader is None and self._has_begun and event.finish_reason is None:
            return self._text_frame.fill(event.text) if event.text else b""
        frame = b"" if self._has_begun else self._opening(event)
        self._has_begun = True
        for part in self._parts(event):
            if isinstance(part, AnswerText) and self._kind == _TEXT:
                frame += self._text_frame.fill(part.text) if part.text else b""
            else:
                frame += b"".join(map(_named_event, self._read(part)))
        if event.finish_reason is None:
            return frame
        delta = {"type": "message_delta", "delta": self._ending(event), "usage": _usage(event)}
        return frame + b"".join(map(_named_event, (*self._close(), delta, {"type": "message_stop"})))

    def collector(self, index: int) -> Callable[[TextEvent], object]:
        return self._collect

    def _collect(self, event: TextEvent) -> None:
        self._end = event
        if self._reader is None and self._kind:
            self._pieces.append(event.text)
        else:
            for payload in [each for part in self._parts(event) for each in self._read(part)]:
                self._add(payload)
        if event.finish_reason is not None:
            for payload in self._close():
                self._add(payload)

    async def whole(self) -> bytes:
        blocks = [block for block in self._content if block["type"] != _TEXT or block[_TEXT]]
        return orjson.dumps({**self._head, "content": blocks, **self._ending(self._end), "usage": _usage(self._end)})

    def _parts(self, event: TextEvent) -> Sequence[Part]:
        return (AnswerText(event.text),) if self._reader is None else self._reader.read(event)

    def _opening(self, event: TextEvent) -> bytes:
        """Return the frame that a stream begins with."""
        ending: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        usage = {**_usage(event), "output_tokens": 0}
        message = {**self._head, "content": [], **ending, "usage": usage}
        return _named_event({"type": "message_start", "message": message})

    def _ending(self, end: TextEvent) -> dict[str, str | None]:
        return _ending(end, has_tool_use=self._has_tool_use)

    def _read(self, part: Part) -> Iterator[dict[str, Any]]:
        """Yield the events of a part."""
        if isinstance(part, CallStart):
            self._has_tool_use = True
            yield from self._open(_TOOL_USE, {"type": _TOOL_USE, "id": part.id, "name": part.name, "input": {}})
        elif isinstance(part, CallArguments):
            yield self._delta({"type": "input_json_delta", "partial_json": part.text})
        elif isinstance(part, AnswerText):
            if self._kind != _TEXT:
                yield from self._open(_TEXT, {"type": _TEXT, "text": ""})
            if part.text:
                yield self._delta({"type": "text_delta", "text": part.text})
        else:
            if self._kind != _THINKING:
                yield from self._open(_THINKING, {"type": _THINKING, "thinking": "", "signature": ""})
            self._thoughts.update(part.text.encode(errors="surrogatepass"))
            yield self._delta({"type": "thinking_delta", "thinking": part.text})

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._kind, self._index = kind, self._index + 1
        if kind == _TEXT:
            delta = self._delta({"type": "text_delta", "text": PLACEHOLDER})
            self._text_frame = TextFrame.around(delta, name=delta["type"])
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._kind == _THINKING:
            # Clients send thoughts back only with a signature. Nothing here checks it.
            yield self._delta({"type": "signature_delta", "signature": self._thoughts.hexdigest()})
        if self._kind:
            yield {"type": "content_block_stop", "index": self._index}
        self._kind = ""

    def _delta(self, delta: dict[str, str]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _add(self, payload: dict[str, Any]) -> None:
        """Add what an event tells to the content of the whole answer."""
        if payload["type"] == "content_block_start":
            self._content.append(payload["content_block"])
            self._pieces = []
        elif payload["type"] == "content_block_stop":
            _fill(self._content[-1], "".join(self._pieces))
        elif "signature" in payload["delta"]:
            self._content[-1]["signature"] = payload["delta"]["signature"]
        else:
            self._pieces += [text for name, text in payload["delta"].items() if name != "type"]


def _named_event(payload: dict[str, Any]) -> bytes:
    """Return the frame of an event that is named as its type says."""
    return event_frame(payload, payload["type"])


def _fill(block: dict[str, Any], text: str) -> None:
    """Put the joined text of a block's deltas into it. What of an input was cut off is left out, as in Anthropic's own
    clients."""
    if block["type"] == _TOOL_USE:
        block["input"] = pydantic_core.from_json(text or "{}", allow_partial="trailing-strings")
    else:
        block[block["type"]] = text


def _ending(end: TextEvent, *, has_tool_use: bool) -> dict[str, str | None]:
    """Return why an answer ended, in Anthropic's words."""
    if has_tool_use and end.finish_reason is FinishReason.STOP:
        return {
            "stop_reason": "tool_use",
            "stop_sequence": end.stop_reason if isinstance(end.stop_reason, str) else None,
        }
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
