"""One response as it is generated: OpenAI's events in their order, and the object that they add up to."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import orjson

from sluice.engine.types import FinishReason
from sluice.errors import SluiceError
from sluice.gateway.api.openai.reply import chat_logprobs, citations_field, sources_field
from sluice.gateway.api.openai.responses.archive import ResponseRecord, error_object
from sluice.gateway.api.openai.responses.items import ItemIds, JsonObject
from sluice.gateway.api.openai.responses.tools import CustomInput, DeclaredTool
from sluice.gateway.api.translators import Reply
from sluice.gateway.front.http.errors import as_sluice_error
from sluice.gateway.front.http.sse import encode_text, event_frame
from sluice.pipelines.text.types import (
    AnswerText,
    CallArguments,
    CallStart,
    ChatReader,
    Part,
    ReasoningText,
    TextEvent,
    TextLogprob,
)

Event = tuple[str, JsonObject]
"""An event's type and its fields."""


class OutputItem(ABC):
    """One item: the events of its beginning and its end, and its text so far. `index` is its place in the output."""

    prefix: ClassVar[str]
    text_event: ClassVar[str]
    """The type of the events that carry its text, without `.delta`."""

    def __init__(self, item_id: str, index: int) -> None:
        self._id = item_id
        self._index = index
        self._texts: list[str] = []
        self._logprobs: list[JsonObject] = []
        kind = f"{self.text_event}.delta"
        fields = orjson.dumps({"type": kind, **self._place})
        self._delta_head = b"event: " + kind.encode() + b"\ndata: " + fields[:-1] + b',"delta":'

    @property
    def _place(self) -> JsonObject:
        return {"item_id": self._id, "output_index": self._index}

    @abstractmethod
    def body(self, status: str) -> JsonObject:
        """Return the item in OpenAI's form."""

    @abstractmethod
    def ended(self) -> Iterator[Event]:
        """Yield the events before `output_item.done`."""

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def begun(self) -> Iterator[Event]:
        """Yield the events before the first text."""
        yield "response.output_item.added", {"output_index": self._index, "item": self.body("in_progress")}

    def read(self, text: str) -> str:
        """Return what a piece of the model's text adds to the item's."""
        return text

    def delta(self, text: str, logprobs: Sequence[JsonObject], number: int) -> bytes:
        """Add text, and return the frame of its event. All of it but the text and the number is made in advance."""
        self._texts.append(text)
        self._logprobs += logprobs
        return b'%b%b%b,"sequence_number":%d}\n\n' % (self._delta_head, encode_text(text), self._tail(logprobs), number)

    def _tail(self, logprobs: Sequence[JsonObject]) -> bytes:
        return b""


class _PartedItem(OutputItem):
    """An item whose text is the one part of its content."""

    @abstractmethod
    def _part(self) -> JsonObject: ...

    @property
    def _place(self) -> JsonObject:
        return {**super()._place, "content_index": 0}

    def _content(self, status: str) -> list[JsonObject]:
        return [self._part()] if self._texts or status != "in_progress" else []

    def begun(self) -> Iterator[Event]:
        yield from super().begun()
        yield "response.content_part.added", {**self._place, "part": self._part()}

    def ended(self) -> Iterator[Event]:
        part = self._part()
        yield f"{self.text_event}.done", {**self._place, **{name: part[name] for name in part.keys() & _DONE_FIELDS}}
        yield "response.content_part.done", {**self._place, "part": part}


_DONE_FIELDS = {"text", "logprobs"}


class MessageOutput(_PartedItem):
    """The answer's text."""

    prefix = "msg"
    text_event = "response.output_text"

    def _part(self) -> JsonObject:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}

    def body(self, status: str) -> JsonObject:
        fields = {"role": "assistant", "content": self._content(status)}
        return {"id": self._id, "type": "message", "status": status, **fields}

    def _tail(self, logprobs: Sequence[JsonObject]) -> bytes:
        return b',"logprobs":' + orjson.dumps(logprobs) if logprobs else b',"logprobs":[]'


class ReasoningOutput(_PartedItem):
    """The reasoning before the answer."""

    prefix = "rs"
    text_event = "response.reasoning_text"

    def _part(self) -> JsonObject:
        return {"type": "reasoning_text", "text": self.text}

    def body(self, status: str) -> JsonObject:
        fields = {"summary": [], "content": self._content(status)}
        return {"id": self._id, "type": "reasoning", "status": status, **fields}


class CallOutput(OutputItem):
    """A call of a function, whose text is its arguments."""

    prefix = "fc"
    kind = "function_call"
    text_event = "response.function_call_arguments"
    field = "arguments"

    def __init__(self, item_id: str, index: int, call_id: str, name: str, namespace: str) -> None:
        super().__init__(item_id, index)
        self._call = {"call_id": call_id, "name": name, **({"namespace": namespace} if namespace else {})}

    def body(self, status: str) -> JsonObject:
        return {"id": self._id, "type": self.kind, "status": status, **self._call, self.field: self.text}

    def ended(self) -> Iterator[Event]:
        yield f"{self.text_event}.done", {**self._place, **self._done_fields}

    @property
    def _done_fields(self) -> JsonObject:
        return {"name": self._call["name"], self.field: self.text}


class CustomCallOutput(CallOutput):
    """A call of a custom tool, whose text is its input."""

    prefix = "ctc"
    kind = "custom_tool_call"
    text_event = "response.custom_tool_call_input"
    field = "input"

    def __init__(self, *details: Any) -> None:
        super().__init__(*details)
        self._input = CustomInput()

    def read(self, text: str) -> str:
        return self._input.feed(text)

    @property
    def text(self) -> str:
        return super().text or self._input.finish()

    @property
    def _done_fields(self) -> JsonObject:
        return {self.field: self.text}


_KINDS: dict[type[Part], type[OutputItem]] = {
    AnswerText: MessageOutput,
    ReasoningText: ReasoningOutput,
    CallArguments: CallOutput,
}


class ResponseReply(Reply):
    """Formats one response. Its methods return the events that follow, as frames: event n has the sequence number n.

    `top_logprobs` is the number of alternatives; None for no log probabilities.
    """

    def __init__(
        self,
        record: ResponseRecord,
        request_id: str,
        ids: ItemIds,
        top_logprobs: int | None = None,
        reader: ChatReader | None = None,
        tools: Mapping[str, DeclaredTool] = MappingProxyType({}),
    ) -> None:
        """`reader` None: the answer is text alone. `tools` are those that its calls may be of, by their functions."""
        self.record = record
        self.response = record.response
        self.request_id = request_id
        self._ids = ids
        self._top_logprobs = top_logprobs
        self._reader = reader
        self._tools = tools
        self._unshown: list[TextLogprob] = []
        """Log probabilities of text that the reader keeps back. Those of reasoning and of calls are never shown."""
        self._num_frames = 0
        self._open: OutputItem | None = None
        self._end: TextEvent | None = None

    def queue(self) -> bytes:
        """Return the first events of a response that waits in the background."""
        self.response["status"] = "queued"
        return self._state("created") + self._state("queued")

    def frame(self, index: int, event: TextEvent) -> bytes:
        frames = b"" if self.response["status"] == "in_progress" and self._num_frames else self._begin()
        if self._reader is None:
            parts: Sequence[Part] = (AnswerText(event.text),) if event.text else ()
        else:
            parts = self._reader.read(event)
        if event.detail is not None and event.detail.logprobs:
            self._unshown += event.detail.logprobs
        for part in parts:
            frames += self._add(part)
        if event.finish_reason is not None:
            self._end = event
            if not self.response["output"] and self._open is None:
                frames += self._open_item(MessageOutput)
            frames += self._close_item("incomplete" if event.finish_reason is FinishReason.LENGTH else "completed")
        return frames

    def collector(self, index: int) -> Callable[[TextEvent], object]:
        return partial(self.frame, index)

    async def closing(self) -> bytes:
        """Return the last event. The response is kept before it, as clients may answer it at once."""
        self.finish()
        await self.record.keep()
        return self.last()

    async def whole(self) -> bytes:
        self.finish()
        await self.record.keep()
        return orjson.dumps(self.response)

    def failed(self, error: Exception) -> bytes | None:
        return self.fail(as_sluice_error(error, self.request_id)) if self._num_frames else None

    def _begin(self) -> bytes:
        self.response["status"] = "in_progress"
        created = b"" if self._num_frames else self._state("created")
        return created + self._state("in_progress")

    def _add(self, part: Part) -> bytes:
        if isinstance(part, CallStart):
            tool = self._tools.get(part.name) or DeclaredTool({}, "", part.name)
            kind_of_call = CustomCallOutput if tool.is_custom else CallOutput
            return self._open_item(kind_of_call, part.id, tool.name, tool.namespace)
        kind = _KINDS[type(part)]
        frames = b"" if isinstance(self._open, kind) else self._open_item(kind)
        assert self._open is not None
        shown, self._unshown = self._unshown, []
        logprobs = []
        if shown and self._top_logprobs is not None and kind is MessageOutput:
            logprobs = chat_logprobs(shown, self._top_logprobs)["content"]
        text = self._open.read(part.text)
        return frames + self._open.delta(text, logprobs, self._take_number()) if text else frames

    def finish(self) -> None:
        """Complete the response, unless it has failed or was cancelled."""
        if self.response["status"] != "in_progress":
            return
        assert self._end is not None
        is_cut = self._end.finish_reason is FinishReason.LENGTH
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        self.response["status"] = "incomplete" if is_cut else "completed"
        self.response["usage"] = _usage(self._end, self._reader)
        self.response |= {**sources_field(self._end.detail), **citations_field(self._end)}

    def fail(self, error: SluiceError) -> bytes:
        """End the response in a failure. What it had begun stays, incomplete."""
        self.response |= {"status": "failed", "error": error_object(error)}
        return self._close_item("incomplete")

    def cancel(self) -> bytes:
        """End the response as its client wishes. What it had begun stays, incomplete."""
        self.response["status"] = "cancelled"
        return self._close_item("incomplete")

    def last(self) -> bytes:
        """Return the last event: response.completed, response.incomplete or response.failed."""
        status = self.response["status"]
        # OpenAI publishes no event for a cancelled response. Its clients know these three as last ones, pass on the
        # response's status, and drop an unknown one. They take an incomplete response for an answer that was cut, and
        # incomplete_details has no reason of a cancellation; none takes a failed one for an answer.
        return self._state(status if status in ("completed", "incomplete") else "failed")

    # --- items ---

    def _open_item(self, kind: type[OutputItem], *details: str) -> bytes:
        """Begin an item, after the end of the one before it."""
        frames = self._close_item("completed")
        self._open = kind(self._ids.make(kind.prefix), len(self.response["output"]), *details)
        return frames + self._frames(self._open.begun())

    def _close_item(self, status: str) -> bytes:
        if self._open is None:
            return b""
        item, self._open = self._open, None
        body, index = item.body(status), len(self.response["output"])
        self.response["output"].append(body)
        done = ("response.output_item.done", {"output_index": index, "item": body})
        return self._frames([*item.ended(), done])

    # --- frames ---

    def _state(self, event: str) -> bytes:
        return self._frame(f"response.{event}", {"response": self.response})

    def _frames(self, events: Iterable[Event]) -> bytes:
        return b"".join([self._frame(*event) for event in events])

    def _frame(self, kind: str, fields: JsonObject) -> bytes:
        return event_frame({"type": kind, **fields, "sequence_number": self._take_number()}, kind)

    def _take_number(self) -> int:
        self._num_frames += 1
        return self._num_frames - 1


def _usage(end: TextEvent, reader: ChatReader | None) -> JsonObject | None:
    """Return OpenAI's token counts; None where a pipeline's model does not count."""
    if not end.prompt_tokens and not end.completion_tokens:
        return None
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0 if reader is None else reader.num_reasoning_tokens},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }
