"""`POST /v1/messages`: its prompt, and the shape of its answers."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec
import orjson

from sluice.engine.sampling_fields import SAMPLING_FIELDS
from sluice.engine.types import FinishReason, Grammar, GrammarKind
from sluice.errors import SluiceError, invalid
from sluice.gateway.api.anthropic.schemas import (
    Block,
    CountTokensRequest,
    CustomTool,
    ImageBlock,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from sluice.gateway.api.sampling import CONVERSIONS
from sluice.gateway.api.tools import THINKING_SWITCHES, arguments_text, check_tool_names
from sluice.gateway.front.http.errors import anthropic_error_body
from sluice.gateway.front.http.parsing import refuse_foreign
from sluice.gateway.front.http.sse import PLACEHOLDER, TextFrame, event_frame
from sluice.pipelines.text.sampling import drop_random_seed
from sluice.pipelines.text.types import (
    ChatMessage,
    Conversation,
    ImagePart,
    TemplateOptions,
    TextEvent,
    TextRequest,
    ToolCall,
    ToolChoice,
)

PROTOCOL = "anthropic_messages"
PARAM_NAMES = {"stop": "stop_sequences", "grammar": "output_config.format.schema", "query": "messages"}
"""The client's names of fields that models name otherwise in their errors."""
_BETWEEN_TURNS = "\n\n"
"""Joins the texts of turns that one role has in a row: they are one turn, as with Anthropic."""


def parse_conversation(fields: CountTokensRequest) -> tuple[Conversation, ToolChoice]:
    """Return the turns, the system's first, with the tools; and the choice among these. The answer goes on with a last
    turn of the assistant. Raises INVALID for what this server cannot do."""
    system = fields.system if isinstance(fields.system, str) else _join_blocks(fields.system or ())
    messages = [ChatMessage("system", system)] if system else []
    for role, group in groupby(enumerate(fields.messages), key=lambda each: each[1].role):
        turns = list(group)
        if role == "system":
            messages.append(_system_message(turns))
        else:
            messages += [_assistant_message(turns)] if role == "assistant" else _user_messages(turns)
    tools, choice = parse_tools(fields)
    thinking = fields.thinking
    arguments = {} if thinking is None else dict.fromkeys(THINKING_SWITCHES, thinking.type != "disabled")
    is_begun = fields.messages[-1].role == "assistant"
    if is_begun:
        _check_begun(messages[-1], f"messages[{len(fields.messages) - 1}].content")
    options = TemplateOptions(
        tools=tools, arguments=arguments, adds_generation_prompt=not is_begun, continues_final_message=is_begun
    )
    return Conversation(tuple(messages), options), choice


def _check_begun(answer: ChatMessage, place: str) -> None:
    """Raise INVALID for a last turn of the assistant that an answer cannot go on with."""
    if answer.tool_calls:
        raise invalid(
            place, f"{place} of the assistant calls tools, so that their results must follow as the user's turn"
        )
    if answer.content != answer.content.rstrip():
        raise invalid(place, f"{place} of the assistant, with which the answer begins, must not end with white space")


def parse_tools(fields: CountTokensRequest) -> tuple[tuple[dict[str, Any], ...], ToolChoice]:
    """Return the tools in OpenAI's form, none where none may be used, and the choice among them."""
    choice, tools = fields.tool_choice, fields.tools or []
    check_tool_names([tool.name for tool in tools], "tools[{}].name")
    is_parallel = choice is None or not choice.disable_parallel_tool_use
    if choice is not None and choice.type in ("any", "tool") and not tools:
        raise invalid(
            "tool_choice.type", f"tool_choice.type must be 'auto' or 'none' without tools, got '{choice.type}'"
        )
    parsed = tuple({"type": "function", "function": _function(tool)} for tool in tools)
    if choice is None or choice.type == "auto":
        return parsed, ToolChoice(is_parallel=is_parallel)
    if choice.type == "none":
        return (), ToolChoice()
    if choice.type == "any":
        return parsed, ToolChoice(is_required=True, is_parallel=is_parallel)
    known = [tool.name for tool in tools]
    if choice.name not in known:
        what = f"one of {', '.join(known)}, got {choice.name!r}"
        raise invalid("tool_choice.name", f"tool_choice.name must be {what}")
    return parsed, ToolChoice(is_required=True, is_parallel=False, names=(choice.name or "",))


def _function(tool: CustomTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {name: value for name, value in (function | {"strict": tool.strict}).items() if value is not None}


def _system_message(turns: Iterable[tuple[int, Turn]]) -> ChatMessage:
    """Return the turns that the system has in a row among those of the others. The model's chat template decides where
    they stand in the prompt."""
    texts = []
    for index, turn in turns:
        wrong = next((each for each in enumerate(_blocks(turn)) if not isinstance(each[1], TextBlock)), None)
        if wrong is not None:
            role = "assistant" if isinstance(wrong[1], ToolUseBlock | ThinkingBlock | RedactedThinkingBlock) else "user"
            raise _misplaced(index, wrong[0], wrong[1].type, role)
        texts.append(turn.content if isinstance(turn.content, str) else _join_blocks(turn.content))
    return ChatMessage("system", _BETWEEN_TURNS.join(texts))


def _assistant_message(turns: Iterable[tuple[int, Turn]]) -> ChatMessage:
    """Return the turns that the assistant has in a row as one."""
    texts, thoughts, calls = [], [], list[ToolCall]()
    for index, turn in turns:
        texts.append(turn.content if isinstance(turn.content, str) else _join_blocks(turn.content))
        for number, block in enumerate(_blocks(turn)):
            if isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                calls.append(ToolCall(block.id, block.name, arguments_text(block.input)))
            elif isinstance(block, ToolResultBlock):
                raise _misplaced(index, number, "tool_result", "user")
            elif isinstance(block, ImageBlock):
                raise _misplaced(index, number, "image", "user")
    text = _BETWEEN_TURNS.join(filter(None, texts))
    return ChatMessage("assistant", text, reasoning="\n".join(thoughts), tool_calls=tuple(calls))


def _user_messages(turns: Iterable[tuple[int, Turn]]) -> Iterator[ChatMessage]:
    """Yield the turns that the user has in a row: the results of calls, and the text and the images between them."""
    texts: list[str] = []
    parts: list[str | ImagePart] = []
    for index, turn in turns:
        text = turn.content if isinstance(turn.content, str) else ""
        parts += [_BETWEEN_TURNS] * bool(parts) + [text] * bool(text)
        for number, block in enumerate(_blocks(turn)):
            if isinstance(block, TextBlock):
                text += block.text
                parts.append(block.text)
            elif isinstance(block, ImageBlock):
                parts.append(_image(block, f"messages[{index}].content[{number}].source"))
            elif isinstance(block, ToolUseBlock | ThinkingBlock | RedactedThinkingBlock):
                raise _misplaced(index, number, block.type, "assistant")
            else:
                if text or texts or parts:
                    yield _user_message(list(filter(None, [*texts, text])), parts)
                texts, text, parts = [], "", []
                result = block.content if isinstance(block.content, str) else _join_blocks(block.content or ())
                yield ChatMessage("tool", result, tool_call_id=block.tool_use_id)
        if text or isinstance(turn.content, str):
            texts.append(text)
    if texts or parts:
        yield _user_message(texts, parts)


def _user_message(texts: Sequence[str], parts: Sequence[str | ImagePart]) -> ChatMessage:
    has_images = any(isinstance(each, ImagePart) for each in parts)
    return ChatMessage("user", _BETWEEN_TURNS.join(texts), parts=tuple(parts) if has_images else ())


def _image(block: ImageBlock, path: str) -> ImagePart:
    source = block.source
    if source.type == "base64":
        if source.data is None:
            raise invalid(f"{path}.data", f"{path}.data is required where its type is base64")
        return ImagePart(f"data:;base64,{source.data}", f"{path}.data")
    if source.url is None:
        raise invalid(f"{path}.url", f"{path}.url is required where its type is url")
    return ImagePart(source.url, f"{path}.url")


def _blocks(turn: Turn) -> Sequence[Block]:
    return () if isinstance(turn.content, str) else turn.content


def _misplaced(index: int, number: int, kind: str, role: str) -> SluiceError:
    path = f"messages[{index}].content[{number}].type"
    return invalid(path, f"{path} may be {kind!r} only where the role is {role}")


def _join_blocks(blocks: Sequence[object]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))


def parse_messages_request(fields: MessagesRequest, base: TextRequest) -> TextRequest:
    """Return the request for the answer. `base` has what every route reads alike: id, protocol and scheduling. Raises
    INVALID for a field of other routes that this one cannot have."""
    refuse_foreign(fields)
    sent = {name: getattr(fields, name) for name, field in SAMPLING_FIELDS.items() if field.is_in_openai}
    sampling: dict[str, Any] = {"max_tokens": fields.max_tokens} | {
        name: CONVERSIONS[name](value) if name in CONVERSIONS else value
        for name, value in drop_random_seed(sent).items()
        if value is not None
    }
    if fields.output_config is not None and fields.output_config.format is not None:
        schema = json.dumps(fields.output_config.format.schema_, ensure_ascii=False)
        sampling["grammar"] = Grammar(GrammarKind.JSON_SCHEMA, schema)
    conversation, choice = parse_conversation(fields)
    return msgspec.structs.replace(
        base,
        prompt=conversation,
        tool_choice=choice,
        sampling=sampling,
        stop=tuple(fields.stop_sequences or ()),
        bad_words=tuple(fields.bad_words or ()),
    )


class MessageReply:
    """Formats one answer, streamed as Anthropic's named events or whole."""

    def __init__(self, reply_id: str, model: str) -> None:
        self._head = {"id": f"msg_{reply_id}", "type": "message", "role": "assistant", "model": model}
        delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": PLACEHOLDER}}
        self._text_frame = TextFrame.around(delta, name="content_block_delta")
        self._has_begun = False

    def whole(self, events: Sequence[TextEvent]) -> bytes:
        """Return the answer as one object."""
        text, end = "".join([event.text for event in events]), events[-1]
        return self.message([{"type": "text", "text": text}] if text else [], end, ending_of(end))

    def message(self, blocks: list[dict[str, Any]], end: TextEvent, ending: dict[str, str | None]) -> bytes:
        """Return an answer of content blocks as one object."""
        return orjson.dumps({**self._head, "content": blocks, **ending, "usage": usage_of(end)})

    def frame(self, event: TextEvent) -> bytes:
        """Return the frames of an event: the opening before the first one, its text, and the closing at the end."""
        frame = b"" if self._has_begun else self.opening(event) + _TEXT_START
        self._has_begun = True
        if event.text:
            frame += self._text_frame.fill(event.text)
        if event.finish_reason is not None:
            frame += named_event({"type": "content_block_stop", "index": 0}) + self.closing(event, ending_of(event))
        return frame

    def closing(self, end: TextEvent, ending: dict[str, str | None]) -> bytes:
        """Return the frames of the end of a stream."""
        delta = {"type": "message_delta", "delta": ending, "usage": usage_of(end)}
        return named_event(delta) + named_event({"type": "message_stop"})

    def opening(self, event: TextEvent) -> bytes:
        """Return the frame that a stream begins with."""
        usage = {**usage_of(event), "output_tokens": 0}
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return named_event({"type": "message_start", "message": message})


def named_event(payload: dict[str, Any]) -> bytes:
    """Return the frame of an event that is named as its type says."""
    return event_frame(payload, payload["type"])


_TEXT_START = named_event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})


def error_frame(error: SluiceError) -> bytes:
    """Return the last event of a stream that failed; no `message_stop` follows it."""
    return b"event: error\ndata: " + anthropic_error_body(error) + b"\n\n"


def ending_of(end: TextEvent) -> dict[str, str | None]:
    """Return why an answer ended, in Anthropic's words."""
    if end.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(end.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def usage_of(event: TextEvent) -> dict[str, int]:
    """Return Anthropic's counts, of which the prompt's tokens are those that were not in the prefix cache."""
    return {
        "input_tokens": event.prompt_tokens - event.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": event.cached_tokens,
        "output_tokens": event.completion_tokens,
    }
