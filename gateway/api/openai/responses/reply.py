"""One response as it is generated: OpenAI's events in their order, and the object that they add up to."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import MappingProxyType

import orjson

from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.fields import cache_miss_fields
from sluice.gateway.api.openai.reply import chat_logprobs, citations_field, sources_field
from sluice.gateway.api.openai.responses.archive import ResponseRecord, error_object
from sluice.gateway.api.openai.responses.client_tools import CLIENT_TOOLS
from sluice.gateway.api.openai.responses.history import read_summary
from sluice.gateway.api.openai.responses.items import ItemIds, JsonObject
from sluice.gateway.api.openai.responses.output import (
    COMPACTION_KINDS,
    KINDS,
    SEALED_KINDS,
    CallOutput,
    ClientCallOutput,
    CustomCallOutput,
    Event,
    OutputItem,
)
from sluice.gateway.api.openai.responses.tools import DeclaredTool, DeclaredTools
from sluice.gateway.api.translators import Reply
from sluice.gateway.front.http.errors import as_sluice_error
from sluice.gateway.front.http.sse import event_frame
from sluice.pipelines.text.types import (
    AnswerText,
    CacheMissReason,
    CallArguments,
    CallStart,
    ChatReader,
    Part,
    TextDetail,
    TextEvent,
    TextLogprob,
)


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
        tools: DeclaredTools = MappingProxyType({}),
        *,
        seals_reasoning: bool = False,
        is_compaction: bool = False,
        compaction: JsonObject | None = None,
    ) -> None:
        """`reader` None: the answer is text alone. `tools` are those that its calls may be of, by their functions. The
        answer `is_compaction` of its prompt, or a `compaction` comes before it."""
        self.record = record
        self.response = record.response
        self.request_id = request_id
        self._ids = ids
        self._top_logprobs = top_logprobs
        self._reader = reader
        self._tools = tools
        self._is_compaction = is_compaction
        self._kinds = {
            **KINDS,
            **(SEALED_KINDS if seals_reasoning else {}),
            **(COMPACTION_KINDS if is_compaction else {}),
        }
        self._compaction = compaction
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
                frames += self._open_item(self._kinds[AnswerText], self._kinds[AnswerText].prefix)
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
        return created + self._state("in_progress") + self._show_compaction()

    def _show_compaction(self) -> bytes:
        if (item := self._compaction) is None:
            return b""
        place = {"output_index": len(self.response["output"])}
        self.response["output"].append(item)
        added, done = [(f"response.output_item.{event}", {**place, "item": item}) for event in ("added", "done")]
        return self._frames([added, ("response.compaction.compacting", {**place, "item_id": item["id"]}), done])

    def _add(self, part: Part) -> bytes:
        if isinstance(part, CallStart):
            return self._open_call(part)
        kind = self._kinds[type(part)]
        is_open = self._open is not None and (isinstance(part, CallArguments) or isinstance(self._open, kind))
        frames = b"" if is_open else self._open_item(kind, kind.prefix)
        assert self._open is not None
        shown, self._unshown = self._unshown, []
        logprobs = []
        if shown and self._top_logprobs is not None and isinstance(part, AnswerText):
            logprobs = chat_logprobs(shown, self._top_logprobs)["content"]
        text = self._open.read(part.text)
        return frames + self._open.delta(text, logprobs, self._take_number()) if text else frames

    def finish(self) -> None:
        """Complete the response, unless it has failed or was cancelled. A compaction without a summary fails: what it
        stands for would be lost."""
        if self._is_compaction and not any(map(read_summary, self.response["output"])):
            self.fail(SluiceError(ErrorCode.UNAVAILABLE, "the model wrote no summary; try again"))
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
        if "prompt_cache_diagnostics" in self.response:
            self.response["prompt_cache_diagnostics"] = _diagnose_cache(self._end.detail)
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

    def _open_call(self, call: CallStart) -> bytes:
        tool = self._tools.get(call.name) or DeclaredTool({}, "", call.name)
        if tool.kind in CLIENT_TOOLS:
            return self._open_item(
                partial(ClientCallOutput, call_id=call.id, name=tool.kind), CLIENT_TOOLS[tool.kind].prefix
            )
        kind = CustomCallOutput if tool.kind == "custom" else CallOutput
        return self._open_item(partial(kind, call_id=call.id, name=tool.name, namespace=tool.namespace), kind.prefix)

    def _open_item(self, make: Callable[[str, int], OutputItem], prefix: str) -> bytes:
        """Begin an item, after the end of the one before it."""
        frames = self._close_item("completed")
        self._open = make(self._ids.make(prefix), len(self.response["output"]))
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


_MISS_REASONS = {
    CacheMissReason.MODEL_CHANGED: "model_changed",
    CacheMissReason.ADAPTER_CHANGED: "model_changed",
    CacheMissReason.TOOLS_CHANGED: "tools_changed",
    CacheMissReason.SYSTEM_CHANGED: "input_changed",
    CacheMissReason.MESSAGES_CHANGED: "input_changed",
    CacheMissReason.PROMPT_CHANGED: "input_changed",
}
"""The reasons that OpenAI has a word for."""


def _diagnose_cache(detail: TextDetail | None) -> JsonObject:
    """Return OpenAI's diagnostics of the prompt cache, which are those of the session's last prompt."""
    miss = None if detail is None else detail.cache_miss
    if miss is None:
        return {"type": "cache_hit"}
    if miss.reason is CacheMissReason.FIRST_REQUEST:
        return {"type": "comparison_response_not_found"}
    if miss.reason not in _MISS_REASONS:
        return {"type": "unavailable"}
    fields = {"cache_missed_tokens": miss.missed_tokens, "comparison_reusable_tokens": miss.token}
    return {"type": "cache_miss", "reason": _MISS_REASONS[miss.reason], **fields}


def _usage(end: TextEvent, reader: ChatReader | None) -> JsonObject | None:
    """Return OpenAI's token counts; None where a pipeline's model does not count."""
    if not end.prompt_tokens and not end.completion_tokens:
        return None
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": end.cached_tokens,
            "cache_write_tokens": 0,
            **cache_miss_fields(None if end.detail is None else end.detail.cache_miss),
        },
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0 if reader is None else reader.num_reasoning_tokens},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }
