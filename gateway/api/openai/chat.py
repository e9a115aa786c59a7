"""`POST /v1/chat/completions`: its prompt, and the shape of its answers, with reasoning and tool calls."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import msgspec
from fastapi import Request

from sluice.engine.types import FinishReason
from sluice.errors import invalid
from sluice.gateway.api.openai.reply import (
    Choice,
    JsonObject,
    OpenAIReply,
    ReplyOptions,
    chat_logprobs,
    ending_fields,
)
from sluice.gateway.api.openai.requests import (
    OpenAITranslator,
    can_reason,
    check_trust,
    effort_arguments,
    parse_template_options,
)
from sluice.gateway.api.openai.schemas import ChatCompletionRequest
from sluice.gateway.api.openai.turns import ChatTurn, ChatTurnReader, parse_tools
from sluice.gateway.front.http.parsing import join_text
from sluice.gateway.front.http.sse import PLACEHOLDER, TextFrame, event_frame
from sluice.pipelines.text.chat_template import names_in_template
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.types import (
    BUDGET_ARGUMENT,
    EFFORT_ARGUMENT,
    THINKING_SWITCHES,
    AnswerText,
    CallArguments,
    CallStart,
    ChatMessage,
    ChatReader,
    Conversation,
    Part,
    ReasoningText,
    TextEvent,
    TextLogprob,
    TextRequest,
)

_PLAIN_ROLES, _PLAIN_FIELDS = ("system", "developer", "user", "assistant"), {"role", "content"}
_VERBOSITY = "verbosity"
_TOOL_FIELDS = {"tools", "tool_choice", "functions", "function_call"}
_FUNCTION_NAMES = {"tools": "functions", "tool_choice": "function_call"}
_LIMITING = frozenset({*THINKING_SWITCHES, EFFORT_ARGUMENT, BUDGET_ARGUMENT})
"""Arguments that the server acts on itself where the template does not take them."""
_LENGTH_NAME = {"max_tokens": "max_completion_tokens"}
"""The client's names of fields that models name otherwise in their errors."""


class ChatReply(OpenAIReply):
    """Formats answers as messages."""

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self, first: TextEvent) -> bytes:
        fields = self.prompt_fields([first.detail]) if first.detail is not None else {}
        frames = [self._opening(0, first, fields), *(self._opening(i, first, {}) for i in range(1, self._options.n))]
        return b"".join(frames)

    def _opening(self, index: int, first: TextEvent, fields: JsonObject) -> bytes:
        delta = {"role": "assistant", "content": ""}
        piece = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **self.token_fields(None)}
        return event_frame({**self.chunk(piece, first.prompt_tokens), **fields})

    def piece(self, index: int, text: str, logprobs: JsonObject | None) -> JsonObject:
        return {"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}

    def last_piece(self, index: int, end: TextEvent, logprobs: JsonObject | None) -> JsonObject:
        return {"index": index, "delta": {}, "logprobs": logprobs, **ending_fields(end)}

    def choice(self, index: int, choice: Choice, logprobs: JsonObject | None) -> JsonObject:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        fields = {"index": index, "message": message, "logprobs": logprobs, **ending_fields(choice.end)}
        return {**fields, **self.token_fields(choice.token_ids)}

    def logprobs(self, entries: Sequence[TextLogprob], num_top: int) -> JsonObject:
        return chat_logprobs(entries, num_top)

    def extra_fields(self, choices: Sequence[Choice]) -> JsonObject:
        """Return what vLLM says of the prompt, which it has beside the choices here."""
        return self.prompt_fields(choices[0].details)


@dataclass(slots=True)
class _ChoiceState:
    """The state of a streamed choice: what it has shown so far, and what waits for its next piece."""

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

    def collector(self, index: int) -> Callable[[TextEvent], object]:
        choice, reader = self._collected[index], self._states[index].reader

        def collect(event: TextEvent) -> None:
            choice.events.append(event)
            choice.parts += reader.read(event)

        return collect

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


class ChatTranslator(OpenAITranslator[ChatCompletionRequest]):
    """A conversation to answer."""

    protocol = "openai_chat"
    names: ClassVar[Mapping[str, str]] = {"query": "messages"}
    reply_type = ChatReply

    def __init__(self, fields: ChatCompletionRequest, request: Request, *, trusts_templates: bool) -> None:
        super().__init__(fields, request)
        check_trust(fields, trusts_templates=trusts_templates)

    def parse(self, base: TextRequest) -> list[TextRequest]:
        fields, is_older = self.fields, bool(self.fields.functions)
        if fields.best_of not in (None, 1) and not self.wants_beams:
            raise invalid("best_of", f"best_of is not supported, got {fields.best_of}; leave it out or send 1")
        messages, notes = parse_messages(fields.messages)
        sent = {} if fields.verbosity is None else {_VERBOSITY: fields.verbosity}
        template = parse_template_options(fields, sent | effort_arguments(fields.reasoning_effort))
        if not _TOOL_FIELDS.isdisjoint(fields.model_fields_set):
            parsed = parse_tools(fields)
            template = msgspec.structs.replace(template, tools=parsed.tools)
            base = msgspec.structs.replace(base, tool_choice=parsed.choice)
            notes = [*notes, *parsed.notes]
        if fields.prediction is not None:
            base = msgspec.structs.replace(base, prediction=join_text(fields.prediction.content), returns_metrics=True)
        if fields.thinking_token_budget not in (None, -1):
            base = msgspec.structs.replace(base, thinking_token_budget=fields.thinking_token_budget)
        prompt = Conversation(messages, template, tuple(notes))
        requests = self.parse_generation(base, [prompt], self._max_tokens(), self._logprobs())
        names = (_FUNCTION_NAMES if is_older else {}) | (
            _LENGTH_NAME if fields.max_completion_tokens is not None else {}
        )
        self.param_names = {**self.param_names, **names}
        has_reasoning = fields.include_reasoning is not False
        self.options = replace(self.options, has_functions=is_older, has_reasoning=has_reasoning)
        return requests

    def _max_tokens(self) -> int | None:
        """Return the newer field or the older one; None leaves the answer all of the context."""
        old, new = self.fields.max_tokens, self.fields.max_completion_tokens
        if None not in (old, new) and old != new:
            raise invalid(
                "max_completion_tokens",
                f"max_completion_tokens ({new}) and max_tokens ({old}) are the same limit under a new and an old name; "
                "send one of them",
            )
        return old if new is None else new

    def _logprobs(self) -> int | None:
        """Return how many alternatives the answer has; None for no log probabilities."""
        top = self.fields.top_logprobs
        if self.fields.logprobs:
            return top or 0
        if top:
            raise invalid("top_logprobs", f"top_logprobs needs logprobs to be true, got {top} without it")
        return None

    def without_effect(self, model: TextModel, request: TextRequest) -> list[str]:
        names, prompt = super().without_effect(model, request), request.prompt
        has_budget = request.thinking_token_budget is not None
        if not isinstance(prompt, Conversation) or not (prompt.options.arguments or has_budget):
            return names
        template, effort = prompt.options.template, effort_arguments(self.fields.reasoning_effort)
        known = model.template_names if template is None else names_in_template(template)
        limits = can_reason(model, request, known)
        if has_budget and not limits:
            names.append("thinking_token_budget")
        if effort and known.isdisjoint(effort) and not limits:
            names.append("reasoning_effort")
        unknown = prompt.options.arguments.keys() - known - effort.keys() - (_LIMITING if limits else frozenset())
        return names + [name if name == _VERBOSITY else f"chat_template_kwargs.{name}" for name in sorted(unknown)]

    def reply(self, model: TextModel, readers: Sequence[ChatReader]) -> OpenAIReply:
        return self._make_reply(partial(PartsReply, readers=readers) if readers else ChatReply, model)


def parse_messages(turns: Sequence[ChatTurn]) -> tuple[tuple[ChatMessage, ...], list[str]]:
    """Return the turns of a conversation, and notes of what is read otherwise than it was sent. Raises as
    `ChatTurnReader.read`."""
    if all(map(_is_plain, turns)):
        return tuple([ChatMessage(turn.role, turn.content) for turn in turns if isinstance(turn.content, str)]), []
    reader = ChatTurnReader(turns)
    return reader.read(), reader.notes


def _is_plain(turn: ChatTurn) -> bool:
    is_text = turn.role in _PLAIN_ROLES and isinstance(turn.content, str)
    return is_text and turn.model_fields_set <= _PLAIN_FIELDS
