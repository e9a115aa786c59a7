"""One response as it is generated: OpenAI's events in their order, and the object that they add up to."""

import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.openai.reply import chat_logprobs, citations_field, sources_field
from sluice.gateway.api.openai.responses.items import ItemIds, JsonObject
from sluice.gateway.api.openai.responses.output import (
    CallOutput,
    CustomCallOutput,
    Event,
    MessageOutput,
    OutputItem,
    ReasoningOutput,
)
from sluice.gateway.api.openai.responses.tools import DeclaredTool
from sluice.gateway.front.http.sse import event_frame
from sluice.gateway.front.path_masking import client_message
from sluice.pipelines.text.parts import AnswerText, CallArguments, CallStart, ChatReader, Part, ReasoningText
from sluice.pipelines.text.types import TextEvent, TextLogprob

_ERROR_CODES = {ErrorCode.INVALID: "invalid_prompt", ErrorCode.OVERLOADED: "rate_limit_exceeded"}
"""OpenAI's codes of failed responses; every other failure is a server_error."""


_KINDS: dict[type[Part], type[OutputItem]] = {
    AnswerText: MessageOutput,
    ReasoningText: ReasoningOutput,
    CallArguments: CallOutput,
}


class ResponseReply:
    """Formats one response. Its methods return the events that follow, as frames: event n has the sequence number n.

    `response` is the object up to now. `top_logprobs` is the number of alternatives; None for no log probabilities.
    """

    def __init__(
        self,
        response: JsonObject,
        ids: ItemIds,
        top_logprobs: int | None = None,
        reader: ChatReader | None = None,
        tools: Mapping[str, DeclaredTool] = MappingProxyType({}),
    ) -> None:
        """`reader` None: the answer is text alone. `tools` are those that its calls may be of, by their functions."""
        self.response = response
        self._ids = ids
        self._top_logprobs = top_logprobs
        self._reader = reader
        self._tools = tools
        self._unshown: list[TextLogprob] = []
        """Log probabilities of text that the reader keeps back. Those of reasoning and of calls are never shown."""
        self._num_frames = 0
        self._open: OutputItem | None = None
        self._end: TextEvent | None = None

    @property
    def has_begun(self) -> bool:
        """Whether any event went out."""
        return self._num_frames > 0

    def queue(self) -> list[bytes]:
        """Return the first events of a response that waits in the background."""
        self.response["status"] = "queued"
        return [self._state("created"), self._state("queued")]

    def feed(self, event: TextEvent) -> list[bytes]:
        """Return the events of more text."""
        frames = [] if self.response["status"] == "in_progress" and self.has_begun else self._begin()
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

    def _begin(self) -> list[bytes]:
        self.response["status"] = "in_progress"
        return [*([] if self.has_begun else [self._state("created")]), self._state("in_progress")]

    def _add(self, part: Part) -> list[bytes]:
        if isinstance(part, CallStart):
            tool = self._tools.get(part.name) or DeclaredTool({}, "", part.name)
            kind_of_call = CustomCallOutput if tool.is_custom else CallOutput
            return self._open_item(kind_of_call, part.id, tool.name, tool.namespace)
        kind = _KINDS[type(part)]
        frames = [] if isinstance(self._open, kind) else self._open_item(kind)
        assert self._open is not None
        shown, self._unshown = self._unshown, []
        logprobs = []
        if shown and self._top_logprobs is not None and kind is MessageOutput:
            logprobs = chat_logprobs(shown, self._top_logprobs)["content"]
        text = self._open.read(part.text)
        return [*frames, self._open.delta(text, logprobs, self._take_number())] if text else frames

    def finish(self) -> None:
        """Complete the response, whose last text was fed."""
        assert self._end is not None
        is_cut = self._end.finish_reason is FinishReason.LENGTH
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        self.response["status"] = "incomplete" if is_cut else "completed"
        self.response["usage"] = _usage(self._end, self._reader)
        self.response |= {**sources_field(self._end.detail), **citations_field(self._end)}

    def fail(self, error: SluiceError) -> list[bytes]:
        """End the response in a failure. What it had begun stays, incomplete."""
        self.response |= {"status": "failed", "error": error_object(error)}
        return self._close_item("incomplete")

    def cancel(self) -> list[bytes]:
        """End the response as its client wishes. What it had begun stays, incomplete."""
        self.response["status"] = "cancelled"
        return self._close_item("incomplete")

    def closing(self) -> bytes:
        """Return the last event: response.completed, response.incomplete or response.failed."""
        status = self.response["status"]
        # OpenAI publishes no event for a cancelled response. Its clients know these three as last ones, pass on the
        # response's status, and drop an unknown one. They take an incomplete response for an answer that was cut, and
        # incomplete_details has no reason of a cancellation; none takes a failed one for an answer.
        return self._state(status if status in ("completed", "incomplete") else "failed")

    # --- items ---

    def _open_item(self, kind: type[OutputItem], *details: str) -> list[bytes]:
        """Begin an item, after the end of the one before it."""
        frames = self._close_item("completed")
        self._open = kind(self._ids.make(kind.prefix), len(self.response["output"]), *details)
        return frames + self._frames(self._open.begun())

    def _close_item(self, status: str) -> list[bytes]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        body, index = item.body(status), len(self.response["output"])
        self.response["output"].append(body)
        done = ("response.output_item.done", {"output_index": index, "item": body})
        return self._frames([*item.ended(), done])

    # --- frames ---

    def _state(self, event: str) -> bytes:
        return self._frame(f"response.{event}", {"response": self.response})

    def _frames(self, events: Iterable[Event]) -> list[bytes]:
        return [self._frame(*event) for event in events]

    def _frame(self, kind: str, fields: JsonObject) -> bytes:
        return event_frame({"type": kind, **fields, "sequence_number": self._take_number()}, kind)

    def _take_number(self) -> int:
        self._num_frames += 1
        return self._num_frames - 1


def error_object(error: SluiceError) -> dict[str, Any]:
    """Return the field `error` of a response that failed."""
    code = _ERROR_CODES.get(error.code, "server_error")
    return {"code": code, "message": client_message(error), "param": error.param}


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
