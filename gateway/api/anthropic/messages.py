"""Anthropic's messages: their routes, the request of an answer, and the answer as blocks, streamed or whole."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec
import orjson
import pydantic_core
from fastapi import APIRouter, Request, Response

from sluice.engine.types import FinishReason, Grammar, GrammarKind
from sluice.errors import SluiceError
from sluice.gateway.api.anthropic.models import reasons, takes_effort
from sluice.gateway.api.anthropic.pdfs import PdfTexts
from sluice.gateway.api.anthropic.prompt import TEMPLATE_EFFORTS, ParsedPrompt, find_pdfs, find_turn, parse_conversation
from sluice.gateway.api.anthropic.schemas import CountTokensRequest, Diagnostics, MessagesRequest
from sluice.gateway.api.fields import cache_miss_fields, json_text, written_json
from sluice.gateway.api.openai.rendering import rendering
from sluice.gateway.api.translators import (
    Answering,
    Reply,
    Translator,
    count_prompt,
    parse_with_schemas,
    read_sampling,
)
from sluice.gateway.front.http.bodies import json_response, read_fields
from sluice.gateway.front.http.errors import anthropic_error_body
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.parsing import refuse_foreign
from sluice.gateway.front.http.sse import PLACEHOLDER, EventStreamResponse, TextFrame, event_frame
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.data_plane import Plane
from sluice.gateway.plane.models import session_in
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.types import (
    AnswerText,
    CacheMiss,
    CacheMissReason,
    CallArguments,
    CallStart,
    ChatReader,
    Part,
    TextEvent,
    TextRequest,
)

PARAM_NAMES = {"stop": "stop_sequences", "grammar": "output_config.format.schema", "query": "messages"}
"""The client's names of fields that models name otherwise in their errors."""
_TEXT, _THINKING, _TOOL_USE = "text", "thinking", "tool_use"
_SIGNATURE_BYTES = 24
_MAX_TOKENS = 2**31 - 1
"""More than any context has."""
_NUMBER = re.compile(r"messages\[(\d+)\]")


def router(plane: Plane, config: ServeConfig, answering: Answering) -> APIRouter:
    """Return the routes under /v1/messages, which answer from `plane`."""
    api = APIRouter(prefix="/v1/messages", tags=["Anthropic"], default_response_class=Response)
    pdfs = PdfTexts()
    translate = partial(MessagesTranslator, pdfs=pdfs)
    answering.serve(api, "", "messages", "Answer a conversation.", MessagesRequest, translate)
    about = "Return the prompt in tokens, as `/inference/v1/generate` takes it."
    answering.serve(api, "/render", "render_messages", about, MessagesRequest, rendering(translate))

    @api.post("/count_tokens", openapi_extra=describe_body(CountTokensRequest))
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a conversation's prompt."""
        fields, headers = await read_fields(request, CountTokensRequest, config.http)
        model = plane.llm(fields.model)
        parse = partial(parse_conversation, fields, model, await pdfs.read(find_pdfs(fields)))
        parsed = await parse_with_schemas(fields, parse, _as_request)
        model.chat_reader(_as_request(parsed))  # refuses tools that the model cannot take
        num_tokens = await count_prompt(model, parsed.conversation, PARAM_NAMES)
        return json_response({"input_tokens": num_tokens}, headers=headers)

    return api


def _as_request(parsed: ParsedPrompt) -> TextRequest:
    return TextRequest(request_id="", prompt=parsed.conversation)


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

    def __init__(self, fields: MessagesRequest, request: Request, pdfs: PdfTexts) -> None:
        super().__init__(fields, request)
        self._pdfs = pdfs
        self._pdf_texts: dict[str, str] = {}
        self.param_names = PARAM_NAMES
        self._max_tokens = min(fields.max_tokens, _MAX_TOKENS)
        self._model: TextModel | None = None
        self._reasons = False
        """Whether the model does, where the request says something about it."""
        self._left_out: list[str] = []

    @property
    def model_name(self) -> str:
        return self.fields.model

    @property
    def priority(self) -> int | None:
        return self.fields.priority

    @property
    def session(self) -> str | None:
        user_id = None if self.fields.metadata is None else self.fields.metadata.user_id
        return session_in(user_id) if user_id else None

    async def prepare(self, model: TextModel) -> None:
        self._model = model
        if found := find_pdfs(self.fields):
            self._pdf_texts = await self._pdfs.read(found)
        self._reasons = self.fields.thinking is not None and reasons(model)

    def parse(self, base: TextRequest) -> list[TextRequest]:
        fields = self.fields
        refuse_foreign(fields)
        form = (fields.output_config and fields.output_config.format) or fields.output_format
        grammar = None if form is None else Grammar(GrammarKind.JSON_SCHEMA, json_text(form.schema_))
        parsed = parse_conversation(fields, self._model, self._pdf_texts)
        self._left_out = parsed.left_out
        request = msgspec.structs.replace(
            base,
            prompt=parsed.conversation,
            tool_choice=parsed.choice,
            sampling=read_sampling(fields, grammar=grammar),
            default_max_tokens=self._max_tokens,  # as with Anthropic, the context may leave fewer
            stop=tuple(fields.stop_sequences or ()),
            bad_words=tuple(fields.bad_words or ()),
            thinking_token_budget=self._budget(),
            requires_budget=False,
        )
        return [request]

    def _budget(self) -> int | None:
        """Return the most tokens of the thoughts, None for any. One that `max_tokens` makes meaningless is none."""
        thinking = self.fields.thinking
        if not self._reasons or thinking is None or thinking.type != "enabled" or thinking.budget_tokens is None:
            return None
        return thinking.budget_tokens if thinking.budget_tokens < self._max_tokens else None

    def without_effect(self, model: TextModel, request: TextRequest) -> list[str]:
        thinking = self.fields.thinking
        asks_for_thoughts = thinking is not None and thinking.type in ("enabled", "adaptive")
        effort = None if self.fields.output_config is None else self.fields.output_config.effort
        is_vain = effort is not None and not (effort in TEMPLATE_EFFORTS and takes_effort(model))
        return [
            *["thinking"] * (asks_for_thoughts and not self._reasons),
            *["output_config.effort"] * is_vain,
            *self._left_out,
        ]

    def with_place(self, miss: CacheMiss) -> CacheMiss:
        found = _NUMBER.fullmatch(miss.at)
        return msgspec.structs.replace(miss, at=find_turn(self.fields, int(found[1]))) if found else miss

    def reply(self, model: TextModel, readers: Sequence[ChatReader]) -> Reply:
        reader = readers[0] if readers else None
        reply = MessageReply(self.request_id, model.name, reader, self._max_tokens)
        reply.asked, reply.with_place = self.fields.diagnostics, self.with_place
        return reply

    @property
    def is_streamed(self) -> bool:
        return bool(self.fields.stream)


class MessageReply(Reply):
    """Formats an answer as the blocks that `reader` finds in its text; None: as a block of text."""

    def __init__(self, reply_id: str, model: str, reader: ChatReader | None, max_tokens: int) -> None:
        """`max_tokens` is what the client allows; an answer that ends before was ended by the context."""
        self._max_tokens = max_tokens
        self.asked: Diagnostics | None = None
        """The client's question about the prompt's cache; None where it has none."""
        self.with_place: Callable[[CacheMiss], CacheMiss] | None = None
        """Names the place of a cache's miss as the client does."""
        self._head: dict[str, Any] = {"id": f"msg_{reply_id}", "type": "message", "role": "assistant", "model": model}
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
        delta = {"type": "message_delta", "delta": self._ending(event), "usage": self._usage(event)}
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
        end = self._end
        return orjson.dumps(
            {**self._head, "content": blocks, **self._ending(end), "usage": self._usage(end), **self._diagnostics(end)}
        )

    def _parts(self, event: TextEvent) -> Sequence[Part]:
        return (AnswerText(event.text),) if self._reader is None else self._reader.read(event)

    def _opening(self, event: TextEvent) -> bytes:
        """Return the frame that a stream begins with."""
        ending: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        usage = {**self._usage(event), "output_tokens": 0}
        message = {**self._head, "content": [], **ending, "usage": usage, **self._diagnostics(event)}
        return _named_event({"type": "message_start", "message": message})

    def _usage(self, event: TextEvent) -> dict[str, Any]:
        """Return the counts up to `event`."""
        usage: dict[str, Any] = dict(_usage(event))
        if event.finish_reason is not None and self._reader is not None and self._reader.finds_reasoning:
            usage["output_tokens_details"] = {"thinking_tokens": self._reader.num_reasoning_tokens}
        miss = None if event.detail is None else event.detail.cache_miss
        if miss is None:
            return usage
        return {**usage, **cache_miss_fields(miss if self.with_place is None else self.with_place(miss))}

    def _diagnostics(self, event: TextEvent) -> dict[str, Any]:
        """Return the field `diagnostics`, where the client asks for it."""
        if self.asked is None:
            return {}
        miss = None if event.detail is None else event.detail.cache_miss
        return {"diagnostics": None if miss is None else _diagnose_cache(miss, self.asked)}

    def _ending(self, end: TextEvent) -> dict[str, str | None]:
        ending = _ending(end, has_tool_use=self._has_tool_use)
        if ending["stop_reason"] == "max_tokens" and 0 < end.completion_tokens < self._max_tokens:
            return ending | {"stop_reason": "model_context_window_exceeded"}
        return ending

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
        block["input"] = written_json(text or "{}") or _begun_json(text)
    else:
        block[block["type"]] = text


def _begun_json(text: str) -> orjson.Fragment:
    with suppress(ValueError):
        begun = pydantic_core.from_json(text, allow_partial="trailing-strings")
        return orjson.Fragment(json.dumps(begun, allow_nan=False))
    return orjson.Fragment("{}")


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


_MISS_TYPES = {
    CacheMissReason.MODEL_CHANGED: "model_changed",
    CacheMissReason.ADAPTER_CHANGED: "model_changed",
    CacheMissReason.TOOLS_CHANGED: "tools_changed",
    CacheMissReason.SYSTEM_CHANGED: "system_changed",
    CacheMissReason.MESSAGES_CHANGED: "messages_changed",
    CacheMissReason.CACHE_SALT_CHANGED: "unavailable",
    CacheMissReason.TEMPLATE_CHANGED: "unavailable",
    CacheMissReason.RENDERING_CHANGED: "unavailable",
}
"""The changes of a request, in Anthropic's words. What the cache has lost is no change."""


def _diagnose_cache(miss: CacheMiss, asked: Diagnostics) -> dict[str, Any] | None:
    """Return Anthropic's diagnostics of a miss; None where the request is no other than what it continues."""
    kind = _MISS_TYPES.get(miss.reason)
    if miss.reason is CacheMissReason.FIRST_REQUEST and asked.previous_message_id is not None:
        kind = "previous_message_not_found"
    if kind is None:
        return None
    has_count = kind.endswith("_changed")
    count = {"cache_missed_input_tokens": miss.missed_tokens} if has_count else {}
    return {"cache_miss_reason": {"type": kind, **count}}


def _usage(event: TextEvent) -> dict[str, int]:
    """Return Anthropic's counts, of which the prompt's tokens are those that were not in the prefix cache."""
    return {
        "input_tokens": event.prompt_tokens - event.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": event.cached_tokens,
        "output_tokens": event.completion_tokens,
    }
