"""The items of a response's output as they are generated: OpenAI's events of each, in their order."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import orjson

from sluice.gateway.api.openai.responses.client_tools import CLIENT_TOOLS, read_arguments
from sluice.gateway.api.openai.responses.items import JsonObject, seal_text
from sluice.gateway.api.openai.responses.tools import CustomInput
from sluice.gateway.front.http.sse import encode_text
from sluice.pipelines.text.types import AnswerText, CallArguments, Part, ReasoningText

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

    def __init__(self, item_id: str, index: int, call_id: str, name: str, namespace: str) -> None:
        super().__init__(item_id, index, call_id, name, namespace)
        self._input = CustomInput()

    def read(self, text: str) -> str:
        return self._input.feed(text)

    @property
    def text(self) -> str:
        return super().text or self._input.finish()

    @property
    def _done_fields(self) -> JsonObject:
        return {self.field: self.text}


class SealedReasoningOutput(ReasoningOutput):
    """The reasoning before the answer, with what a client sends back of it."""

    def body(self, status: str) -> JsonObject:
        sealed = None if status == "in_progress" else seal_text("reasoning", self.text)
        return {**super().body(status), "encrypted_content": sealed}


class ClientCallOutput(OutputItem):
    """A call of a tool that is built into clients. It has no events of its arguments: it comes whole."""

    text_event = "response.function_call_arguments"

    def __init__(self, item_id: str, index: int, call_id: str, name: str) -> None:
        super().__init__(item_id, index)
        self._tool = CLIENT_TOOLS[name]
        self._call_id = call_id

    def body(self, status: str) -> JsonObject:
        if self._tool.call == "apply_patch_call" and status == "incomplete":
            status = "in_progress"  # OpenAI has two states of it
        head = {"id": self._id, "type": self._tool.call, "status": status, "call_id": self._call_id}
        return {**head, **self._tool.read(read_arguments(self.text))}

    def begun(self) -> Iterator[Event]:
        return iter(())

    def read(self, text: str) -> str:
        self._texts.append(text)
        return ""

    def ended(self) -> Iterator[Event]:
        yield from super().begun()
        if self._tool.call == "shell_call":
            event, commands = "response.shell_call_command", self.body("completed")["action"]["commands"]
            for number, command in enumerate(commands):
                place = {"output_index": self._index, "command_index": number}
                yield f"{event}.added", {**place, "command": ""}
                yield f"{event}.delta", {**place, "delta": command}
                yield f"{event}.done", {**place, "command": command}


class CompactionOutput(OutputItem):
    """A compaction. Its text is the summary, of which a client sees no more than that it is being written."""

    prefix = "cmp"
    text_event = "response.compaction"

    def body(self, status: str) -> JsonObject:
        return {"id": self._id, "type": "compaction", "encrypted_content": seal_text("compaction", self.text)}

    def begun(self) -> Iterator[Event]:
        yield from super().begun()
        yield "response.compaction.compacting", self._place

    def ended(self) -> Iterator[Event]:
        return iter(())

    def read(self, text: str) -> str:
        self._texts.append(text)
        return ""


_Kinds = Mapping[type[Part], type[OutputItem]]
KINDS: _Kinds = {AnswerText: MessageOutput, ReasoningText: ReasoningOutput, CallArguments: CallOutput}
"""The items that the parts of an answer become, and those of answers that differ."""
SEALED_KINDS: _Kinds = {ReasoningText: SealedReasoningOutput}
COMPACTION_KINDS: _Kinds = {AnswerText: CompactionOutput}
