"""From the turns and tools of Anthropic's messages to a conversation."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from sluice.errors import SluiceError, invalid
from sluice.gateway.api.anthropic.schemas import (
    Block,
    CountTokensRequest,
    CustomTool,
    ImageBlock,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from sluice.gateway.api.fields import THINKING_SWITCHES, check_tool_names, json_text
from sluice.pipelines.text.types import ChatMessage, Conversation, ImagePart, TemplateOptions, ToolCall, ToolChoice

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
                calls.append(ToolCall(block.id, block.name, json_text(block.input)))
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
