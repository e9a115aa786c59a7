"""The shape of chat answers that have parts besides text: reasoning and tool calls."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice.engine.types import FinishReason
from sluice.gateway.api.openai.chat import ChatReply
from sluice.gateway.api.openai.reply import Choice, JsonObject, ReplyOptions, ending_fields
from sluice.gateway.front.http.sse import PLACEHOLDER, TextFrame, event_frame
from sluice.pipelines.text.parts import AnswerText, CallArguments, CallStart, ChatReader, Part, ReasoningText
from sluice.pipelines.text.types import TextEvent, TextLogprob


@dataclass(slots=True)
class _ChoiceState:
    """What a streamed choice has shown so far, and what waits for its next piece."""

    reader: ChatReader
    has_begun: bool = False
    has_calls: bool = False
    logprobs: list[TextLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    argument_frames: dict[int, TextFrame] = field(default_factory=dict)
    """Frames of pieces of arguments, by the call."""

    def is_plain(self, event: TextEvent) -> bool:
        """Whether an event brings nothing but text to a choice that has begun."""
        is_bare = event.detail is None and event.finish_reason is None
        return is_bare and self.has_begun and not (self.logprobs or self.token_ids)


class PartsReply(ChatReply):
    """Formats answers as messages with the reasoning and the tool calls that `readers` find in their texts."""

    def __init__(self, *, readers: Sequence[ChatReader], options: ReplyOptions, **head: Any) -> None:
        """Take a reader for each stream, and what every answer takes."""
        super().__init__(options=options, **head)
        self._states = [_ChoiceState(reader) for reader in readers]

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(state.reader.num_reasoning_tokens for state in self._states)

    def frame(self, index: int, event: TextEvent) -> bytes:
        state = self._states[index]
        if event.detail is not None:
            state.logprobs += event.detail.logprobs or ()
            state.token_ids += event.detail.token_ids or ()
        parts = state.reader.read(event)
        if len(parts) == 1 and state.is_plain(event) and not self._options.continuous_usage:
            frame = self._plain_frame(index, parts[0], state)
            if frame:
                return frame
        deltas = [delta for part in parts if (delta := self._delta(part)) is not None]
        state.has_calls = state.has_calls or any(isinstance(part, CallStart) for part in parts)
        is_last = event.finish_reason is not None
        frame = b""
        if not state.has_begun and (deltas or is_last):
            state.has_begun = True
            frame = self._beginning(index, event, has_content=not deltas or "content" in deltas[0])
        frame += b"".join([self._choice_frame(self._piece(index, delta, state), event) for delta in deltas])
        if is_last:
            self._ends[index] = event
            last = {**self._piece(index, {}, state), **self._ending(event, has_calls=state.has_calls)}
            frame += self._choice_frame(last, event)
        return frame

    def _plain_frame(self, index: int, part: Part, state: _ChoiceState) -> bytes:
        """Return the frame of a piece of text or of arguments, from one that was made before; "" for other parts."""
        if isinstance(part, AnswerText):
            return self._text_frames[index].fill(part.text)
        if not isinstance(part, CallArguments):
            return b""
        frame = state.argument_frames.get(part.index)
        if frame is None:
            delta = self._delta(CallArguments(part.index, PLACEHOLDER))
            assert delta is not None
            frame = TextFrame.around(self.chunk(self._piece(index, delta, state)))
            state.argument_frames[part.index] = frame
        return frame.fill(part.text)

    def _beginning(self, index: int, first: TextEvent, *, has_content: bool) -> bytes:
        """Return the frame of a choice's role. OpenAI's content is null in a message of calls alone."""
        delta = {"role": "assistant", "content": "" if has_content else None}
        fields = self.prompt_fields([first.detail]) if first.detail is not None and index == 0 else {}
        piece = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **self.token_fields(None)}
        return event_frame({**self.chunk(piece, first.prompt_tokens), **fields})

    def _piece(self, index: int, delta: JsonObject, state: _ChoiceState) -> JsonObject:
        """Return a streamed choice, with the tokens that no piece had yet."""
        logprobs, token_ids = state.logprobs, state.token_ids
        state.logprobs, state.token_ids = [], []
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._format_logprobs(logprobs) if logprobs else None,
            "finish_reason": None,
            **self.token_fields(token_ids),
        }

    def _delta(self, part: Part) -> JsonObject | None:
        if isinstance(part, AnswerText):
            return {"content": part.text}
        if isinstance(part, ReasoningText):
            return _reasoning(part.text) if self._options.has_reasoning else None
        function = {"arguments": part.text} if isinstance(part, CallArguments) else {"name": part.name, "arguments": ""}
        if self._options.has_functions:
            return {"function_call": function}
        if isinstance(part, CallArguments):
            return {"tool_calls": [{"index": part.index, "function": function}]}
        return {"tool_calls": [{"index": part.index, "id": part.id, "type": "function", "function": function}]}

    def choice(self, index: int, choice: Choice, logprobs: JsonObject | None) -> JsonObject:
        text = "".join([part.text for part in choice.parts if isinstance(part, AnswerText)])
        reasoning = "".join([part.text for part in choice.parts if isinstance(part, ReasoningText)])
        calls = list(_calls(choice.parts))
        is_empty = not text and bool(calls or reasoning)
        message: JsonObject = {"role": "assistant", "content": None if is_empty else text, "refusal": None}
        if reasoning and self._options.has_reasoning:
            message |= _reasoning(reasoning)
        if calls and self._options.has_functions:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        fields = {"index": index, "message": message, "logprobs": logprobs}
        return {**fields, **self._ending(choice.end, has_calls=bool(calls)), **self.token_fields(choice.token_ids)}

    def _ending(self, end: TextEvent, *, has_calls: bool) -> JsonObject:
        fields = ending_fields(end)
        if has_calls and end.finish_reason is FinishReason.STOP:
            fields["finish_reason"] = "function_call" if self._options.has_functions else "tool_calls"
        return fields


def _reasoning(text: str) -> JsonObject:
    """Return the reasoning under DeepSeek's name, which most clients read, and under vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _calls(parts: Sequence[Part]) -> Iterator[JsonObject]:
    arguments: dict[int, list[str]] = {}
    for part in parts:
        if isinstance(part, CallArguments):
            arguments.setdefault(part.index, []).append(part.text)
    for part in parts:
        if isinstance(part, CallStart):
            function = {"name": part.name, "arguments": "".join(arguments.get(part.index, ()))}
            yield {"id": part.id, "type": "function", "function": function}
