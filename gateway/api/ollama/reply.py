"""The shape of Ollama's answers: lines of JSON when streamed, one object when whole; and how long they took."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from sluice.errors import SluiceError
from sluice.gateway.api.fields import written_json
from sluice.gateway.api.openai.reply import chat_logprobs
from sluice.gateway.api.translators import Reply
from sluice.gateway.front.http.errors import v2_error_body
from sluice.gateway.front.http.sse import PLACEHOLDER, EventStreamResponse, encode_text
from sluice.pipelines.text.types import CallArguments, CallStart, ChatReader, ReasoningText, TextEvent, TextLogprob

Recall = Callable[[str], Awaitable[list[int] | None]]
"""Returns the token ids of a conversation up to the end of an answer; None where the model gives none."""
_TIME = "\N{OBJECT REPLACEMENT CHARACTER}time"
"""Placeholder for the time at which a line was written."""


class LineStreamResponse(EventStreamResponse):
    """Streams lines of JSON as `EventStreamResponse` streams its frames."""

    media_type = "application/x-ndjson"
    keep_alive_frame = b""


def error_line(error: SluiceError) -> bytes:
    """Return the last line of a stream that failed; no line with `done` follows it."""
    return v2_error_body(error) + b"\n"


def current_time() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    """A piece of an answer that an event brings: text, reasoning, and whole calls."""

    text: str
    thinking: str = ""
    calls: Sequence[dict[str, Any]] = ()


class PieceReader:
    """Reads an answer's events with a `ChatReader`. A call comes when it is whole, as with Ollama."""

    def __init__(self, reader: ChatReader, *, shows_thinking: bool) -> None:
        self._reader = reader
        self._shows_thinking = shows_thinking
        self._call: CallStart | None = None
        self._arguments: list[str] = []

    def read(self, event: TextEvent) -> ReplyPiece:
        text, thinking, calls = "", "", []
        for part in self._reader.read(event):
            if isinstance(part, CallArguments):
                self._arguments.append(part.text)
                continue
            calls += self._take_call()
            if isinstance(part, CallStart):
                self._call = part
            elif isinstance(part, ReasoningText):
                thinking += part.text if self._shows_thinking else ""
            else:
                text += part.text
        if event.finish_reason is not None:
            calls += self._take_call()
        return ReplyPiece(text, thinking, calls)

    def _take_call(self) -> list[dict[str, Any]]:
        """Return the call that has begun, if any; none where the answer's length cut it off."""
        call, arguments = self._call, "".join(self._arguments)
        self._call, self._arguments = None, []
        written = written_json(arguments or "{}")
        if call is None or written is None:
            return []
        return [{"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": written}}]


class OllamaReply(Reply):
    """Formats one answer, of `/api/chat` or else of `/api/generate`."""

    def __init__(self, model: str, num_logprobs: int | None, *, is_chat: bool) -> None:
        """`model` is the client's name of it. `num_logprobs` None: without log probabilities."""
        self.pieces: PieceReader | None = None
        """Reads the parts of the answer; None where it is text alone."""
        self.recall: Recall | None = None
        """Makes the `context` of the end; None where the answer has none."""
        self._model = model
        self._num_logprobs = num_logprobs
        self._is_chat = is_chat
        self._began_ns = time.perf_counter_ns()
        self._first_ns = 0
        self._read: list[ReplyPiece] = []
        self._logprobs: list[TextLogprob] = []
        self._last = b""
        """The line of the last event, which comes with the end."""
        self._end: TextEvent
        line = orjson.dumps({**self._head(_TIME), **self._text(PLACEHOLDER), "done": False})
        self._before_time, rest = line.split(orjson.dumps(_TIME)[1:-1])
        self._before_text, self._after_text = rest.split(orjson.dumps(PLACEHOLDER))

    def frame(self, index: int, event: TextEvent) -> bytes:
        """Return the line of an event, empty where it brings nothing, and for the last one."""
        line = self._line(event, self._take(event))
        if event.finish_reason is None:
            return line
        self._last = line
        return b""

    async def closing(self) -> bytes:
        ending = await self._ending()
        return self._last + orjson.dumps({**self._head(current_time()), **self._text(""), **ending}) + b"\n"

    def collector(self, index: int) -> Callable[[TextEvent], object]:
        return self._collect

    def _collect(self, event: TextEvent) -> None:
        self._take(event)
        self._logprobs += _logprobs(event)

    async def whole(self) -> bytes:
        piece = join_pieces(self._read)
        payload = {**self._head(current_time()), **self._body(piece), **await self._ending()}
        if self._num_logprobs is not None:
            payload["logprobs"] = self._format_logprobs(self._logprobs)
        return orjson.dumps(payload)

    def _take(self, event: TextEvent) -> ReplyPiece:
        """Return what an event brings."""
        self._first_ns = self._first_ns or time.perf_counter_ns()
        self._end = event
        piece = ReplyPiece(event.text) if self.pieces is None else self.pieces.read(event)
        self._read.append(piece)
        return piece

    def _line(self, event: TextEvent, piece: ReplyPiece) -> bytes:
        entries = _logprobs(event) if self._num_logprobs is not None else ()
        if entries or piece.thinking or piece.calls:
            payload = {**self._head(current_time()), **self._body(piece), "done": False}
            logprobs = {"logprobs": self._format_logprobs(entries)} if entries else {}
            return orjson.dumps(payload | logprobs) + b"\n"
        if not piece.text:
            return b""
        now = current_time().encode()
        return self._before_time + now + self._before_text + encode_text(piece.text) + self._after_text + b"\n"

    def loaded(self, reason: str) -> bytes:
        """Return the answer to a request without a prompt, which loads (`load`) or unloads (`unload`) the model."""
        return orjson.dumps({**self._head(current_time()), **self._text(""), "done": True, "done_reason": reason})

    def _head(self, created_at: str) -> dict[str, Any]:
        return {"model": self._model, "created_at": created_at}

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}} if self._is_chat else {"response": text}

    def _body(self, piece: ReplyPiece) -> dict[str, Any]:
        body = self._text(piece.text)
        fields = body["message"] if self._is_chat else body
        if piece.thinking:
            fields["thinking"] = piece.thinking
        if piece.calls:
            fields["tool_calls"] = piece.calls
        return body

    async def _ending(self) -> dict[str, Any]:
        """Return the fields of the end. Times are nanoseconds; the prompt's has the wait to be admitted."""
        end = self._end
        context = None if self.recall is None else await self.recall("".join([piece.text for piece in self._read]))
        now = time.perf_counter_ns()
        return {
            "done": True,
            "done_reason": end.finish_reason,
            **({} if context is None else {"context": context}),
            "total_duration": now - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": end.prompt_tokens,
            "prompt_eval_duration": self._first_ns - self._began_ns,
            "eval_count": end.completion_tokens,
            "eval_duration": max(1, now - self._first_ns),
        }

    def _format_logprobs(self, entries: Sequence[TextLogprob]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = chat_logprobs(entries, self._num_logprobs or 0)["content"]
        return found


def join_pieces(pieces: Sequence[ReplyPiece]) -> ReplyPiece:
    """Return all that the pieces bring."""
    return ReplyPiece(
        "".join([piece.text for piece in pieces]),
        "".join([piece.thinking for piece in pieces]),
        [call for piece in pieces for call in piece.calls],
    )


def _logprobs(event: TextEvent) -> Sequence[TextLogprob]:
    return () if event.detail is None else event.detail.logprobs or ()
