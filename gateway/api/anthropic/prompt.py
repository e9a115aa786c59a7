"""From the turns and tools of Anthropic's messages to a conversation."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from sluice.errors import SluiceError, invalid
from sluice.gateway.api.anthropic.schemas import (
    Block,
    CountTokensRequest,
    CustomTool,
    ImageBlock,
    OtherBlock,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from sluice.gateway.api.anthropic.tools import declare_tools, refuse_ignored
from sluice.gateway.api.fields import choose_tools, json_text, offered_tools
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.types import (
    EFFORT_ARGUMENT,
    THINKING_SWITCHES,
    ChatMessage,
    Conversation,
    ImagePart,
    TemplateOptions,
    ToolCall,
    ToolChoice,
)

_BETWEEN_TURNS = "\n\n"
"""Joins the texts of turns that one role has in a row: they are one turn, as with Anthropic."""
_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
"""Matches the line with which Claude Code's system begins. It differs from request to request, so that no two prompts
would have a prefix in common, and says nothing to a model."""
_NO_PDFS: Mapping[str, str] = {}
_NO_IMAGE = "[image: left out]"
TEMPLATE_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Anthropic's efforts in the words of chat templates that take one."""
_MANY_IMAGES = 1 << 20
_OFF = ("disabled", "between_tools")
"""Types of thinking that switch it off."""

Turns = Iterable[tuple[int, Turn]]
"""Turns with their places in the request."""


class ParsedPrompt(NamedTuple):
    """A conversation, the choice among its tools, and the paths of blocks and tools that the model does not get, or not
    whole, with their types."""

    conversation: Conversation
    choice: ToolChoice
    left_out: list[str]


def find_pdfs(fields: CountTokensRequest) -> list[str]:
    """Return the PDFs in a request's turns, in base64."""
    blocks = [block for turn in fields.messages for block in _blocks(turn)]
    results = (block.content for block in blocks if isinstance(block, ToolResultBlock) and block.content)
    within = [block for content in results if not isinstance(content, str) for block in content]
    return [block.pdf for block in (*blocks, *within) if isinstance(block, OtherBlock) and block.pdf]


def parse_conversation(
    fields: CountTokensRequest, model: TextModel | None = None, pdfs: Mapping[str, str] = _NO_PDFS
) -> ParsedPrompt:
    """Return the turns, the system's first, with the tools; and the choice among these. The answer goes on with a last
    turn of the assistant. What `model` cannot take is left out; with None nothing is. `pdfs` are the texts of those of
    `find_pdfs` that can be read. Raises INVALID for what this server cannot do."""
    reader = TurnReader(len(fields.messages) - 1, _MANY_IMAGES if model is None else model.max_images, pdfs)
    messages = list(reader.read(fields))
    tools, choice, ignored, notes = parse_tools(fields)
    names = frozenset[str]() if model is None else model.template_names
    is_begun = fields.messages[-1].role == "assistant"
    if is_begun and messages and not (messages[-1].content or messages[-1].tool_calls):
        is_begun = False
        messages.pop()
    if is_begun:
        _check_begun(messages[-1], f"messages[{len(fields.messages) - 1}].content")
    options = TemplateOptions(
        tools=tools,
        arguments=_template_arguments(fields, names),
        adds_generation_prompt=not is_begun,
        continues_final_message=is_begun,
    )
    messages = list(reader.without_old_images(messages))
    return ParsedPrompt(Conversation(tuple(messages), options, notes), choice, reader.left_out + ignored)


def _template_arguments(fields: CountTokensRequest, names: frozenset[str]) -> dict[str, Any]:
    """Return the variables that say whether and how long the model thinks. A chat template without an effort among its
    `names` leaves that to the server."""
    thinking, output = fields.thinking, fields.output_config
    arguments: dict[str, Any] = {}
    if thinking is not None:
        arguments = dict.fromkeys(THINKING_SWITCHES, thinking.type not in _OFF)
    if output is not None and output.effort in TEMPLATE_EFFORTS:
        arguments[EFFORT_ARGUMENT] = TEMPLATE_EFFORTS[output.effort] if EFFORT_ARGUMENT in names else output.effort
    return arguments


def find_turn(fields: CountTokensRequest, number: int) -> str:
    """Return the client's place of message `number` of the conversation that `parse_conversation` returns: "system", or
    the first of the turns that are one message; behind the last turn where the conversation has fewer messages."""
    return TurnReader(len(fields.messages) - 1, _MANY_IMAGES, _NO_PDFS).find(fields, number)


def _check_begun(answer: ChatMessage, place: str) -> None:
    """Raise INVALID for a last turn of the assistant that an answer cannot go on with."""
    if answer.tool_calls:
        raise invalid(
            place, f"{place} of the assistant calls tools, so that their results must follow as the user's turn"
        )
    if answer.content != answer.content.rstrip():
        raise invalid(place, f"{place} of the assistant, with which the answer begins, must not end with white space")


def parse_tools(
    fields: CountTokensRequest,
) -> tuple[tuple[dict[str, Any], ...], ToolChoice, list[str], tuple[str, ...]]:
    """Return the tools in OpenAI's form, none where none may be used; the choice among them; what is ignored; and notes
    of those that are left out."""
    declared = declare_tools(fields.tools or ())
    choice, tools = fields.tool_choice, list(declared.functions.values())
    offered = offered_tools([tool.name for tool in tools], [f"{path}.name" for path in declared.functions])
    tools = offered.of(tools)
    ignored = [f"{path} ({tool.type})" for path, tool in declared.ignored.items()]
    if choice is not None:
        refuse_ignored(choice, declared)
    parsed = tuple({"type": "function", "function": _function(tool)} for tool in tools)
    if choice is None:
        return parsed, ToolChoice(), ignored, offered.notes
    if choice.type == "none":
        return (), ToolChoice(), ignored, ()
    named = {"tool_choice.name": choice.name or ""} if choice.type == "tool" else {}
    chosen = choose_tools(
        {tool.name: tool.name for tool in tools},
        named,
        is_required=choice.type != "auto",
        is_parallel=not named and not choice.disable_parallel_tool_use,
        path="tool_choice.type",
    )
    return parsed, chosen, ignored, offered.notes


def _function(tool: CustomTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {name: value for name, value in (function | {"strict": tool.strict}).items() if value is not None}


class TurnReader:
    """Reads the turns of one request, and notes what the model does not get of them."""

    def __init__(self, last: int, max_images: int, pdfs: Mapping[str, str]) -> None:
        """`last` is the place of the last turn: its images are the model's to refuse, so that nobody takes an answer
        for one about them."""
        self.left_out: list[str] = []
        self._last = last
        self._max_images = max_images
        self._pdfs = pdfs

    def read(self, fields: CountTokensRequest) -> Iterator[ChatMessage]:
        """Yield the messages."""
        if system := self._system(fields):
            yield ChatMessage("system", system)
        for role, group in groupby(_shown(fields.messages), key=lambda each: each[1].role):
            turns = list(group)
            if role == "system":
                yield ChatMessage("system", _BETWEEN_TURNS.join(self._plain_text(*each) for each in turns))
            elif role == "assistant":
                yield self._assistant_message(turns)
            else:
                yield from self._user_messages(turns)

    def find(self, fields: CountTokensRequest, number: int) -> str:
        """Return the place of message `number`, by `find_turn`."""
        first = 1 if self._system(fields) else 0
        if number < first:
            return "system"
        for role, group in groupby(_shown(fields.messages), key=lambda each: each[1].role):
            turns = list(group)
            first += sum(1 for _ in self._user_messages(turns)) if role == "user" else 1
            if number < first:
                return f"messages[{turns[0][0]}]"
        return f"messages[{len(fields.messages)}]"

    def without_old_images(self, messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
        """Yield the messages with the newest images, as many as the model takes."""
        num_old = sum(isinstance(part, ImagePart) for each in messages for part in each.parts) - self._max_images
        for message in messages:
            if num_old > 0 and self._max_images and message.parts:
                parts = list[str | ImagePart]()
                for part in message.parts:
                    is_old = isinstance(part, ImagePart) and num_old > 0
                    if isinstance(part, ImagePart) and is_old:
                        num_old -= 1
                        self.left_out.append(f"{part.path.rpartition('.source')[0]} (image)")
                    parts.append(_NO_IMAGE if is_old else part)
                has_images = any(isinstance(part, ImagePart) for part in parts)
                text = message.content if has_images else "".join(part for part in parts if isinstance(part, str))
                message = msgspec.structs.replace(message, content=text, parts=tuple(parts) if has_images else ())
            yield message

    def _system(self, fields: CountTokensRequest) -> str:
        if isinstance(fields.system, str):
            return _BILLING.sub("", fields.system, count=1) if _BILLING.match(fields.system) else fields.system
        texts = [self._text(each, f"system[{place}]") for place, each in enumerate(fields.system or ())]
        if texts and (line := _BILLING.match(texts[0])):
            texts[0] = texts[0][line.end() :]
        return "".join(texts)

    def _plain_text(self, index: int, turn: Turn) -> str:
        """Return what a turn has to read, whatever its blocks are. The model's chat template decides where a turn of
        the system stands in the prompt."""
        if isinstance(turn.content, str):
            return turn.content
        return "".join(self._text(block, _place(index, number)) for number, block in enumerate(turn.content))

    def _text(self, block: Any, path: str) -> str:
        """Return the text of a block; "" for one without, which is noted."""
        if isinstance(block, TextBlock):
            return block.text
        if isinstance(block, OtherBlock) and block.is_whole:
            return block.text
        if isinstance(block, OtherBlock) and block.pdf in self._pdfs:
            return f"{block.text}\n{self._pdfs[block.pdf]}\n"
        if isinstance(block, ToolResultBlock) and block.content:
            return self._result_text(block, path)
        self.left_out.append(f"{path} ({block.type})")
        if not isinstance(block, OtherBlock):
            return ""
        return block.text + f"[{block.unread}: left out]\n" * (block.type == "document")

    def _result_text(self, block: ToolResultBlock, path: str) -> str:
        if block.content is None or isinstance(block.content, str):
            return block.content or ""
        texts = []
        for number, each in enumerate(block.content):
            is_image = isinstance(each, ImageBlock)
            has_place = is_image and self._max_images
            texts.append("" if has_place else self._text(each, f"{path}.content[{number}]"))
            texts.append(("[image]" if has_place else _NO_IMAGE) * is_image)
        return "".join(texts)

    def _assistant_message(self, turns: Turns) -> ChatMessage:
        """Return the turns that the assistant has in a row as one."""
        texts, thoughts, calls = [], [], list[ToolCall]()
        for index, turn in turns:
            text = turn.content if isinstance(turn.content, str) else ""
            for number, block in enumerate(_blocks(turn)):
                if isinstance(block, ThinkingBlock):
                    thoughts.append(block.thinking)
                elif isinstance(block, ToolUseBlock):
                    calls.append(ToolCall(block.id, block.name, json_text(block.input)))
                elif isinstance(block, ToolResultBlock | ImageBlock):
                    raise _misplaced(index, number, block.type, "user")
                elif not isinstance(block, RedactedThinkingBlock):
                    text += self._text(block, _place(index, number))
            texts.append(text)
        text = _BETWEEN_TURNS.join(filter(None, texts))
        return ChatMessage("assistant", text, reasoning="\n".join(thoughts), tool_calls=tuple(calls))

    def _user_messages(self, turns: Turns) -> Iterator[ChatMessage]:
        """Yield the turns that the user has in a row: the results of calls, and the text and the images between them.
        Images in results follow them, as turns of tools have text alone in most chat templates."""
        texts: list[str] = []
        parts: list[str | ImagePart] = []
        images: list[ImagePart] = []
        has_results = False
        for index, turn in turns:
            text = turn.content if isinstance(turn.content, str) else ""
            parts += [_BETWEEN_TURNS] * bool(parts) + [text] * bool(text)
            for number, block in enumerate(_blocks(turn)):
                if isinstance(block, TextBlock):
                    text += block.text
                    parts += [block.text] * bool(block.text)
                elif isinstance(block, ToolResultBlock):
                    if text or texts or parts:
                        yield _user_message(list(filter(None, [*texts, text])), [*images, *parts])
                        images = []
                    texts, text, parts, has_results = [], "", [], True
                    path = _place(index, number)
                    yield ChatMessage("tool", self._result_text(block, path), tool_call_id=block.tool_use_id)
                    images += self._result_images(block, path)
                elif isinstance(block, ToolUseBlock | ThinkingBlock | RedactedThinkingBlock):
                    raise _misplaced(index, number, block.type, "assistant")
                elif isinstance(block, ImageBlock) and (self._max_images or index == self._last):
                    parts.append(_image(block, _place(index, number)))
                else:
                    more = self._text(block, _place(index, number)) + _NO_IMAGE * isinstance(block, ImageBlock)
                    text += more
                    parts += [more] * bool(more)
            if text or not _blocks(turn):
                texts.append(text)
        if texts or parts or images or not has_results:
            yield _user_message(texts, [*images, *parts])

    def _result_images(self, block: ToolResultBlock, path: str) -> list[ImagePart]:
        if not self._max_images or block.content is None or isinstance(block.content, str):
            return []
        found = [each for each in enumerate(block.content) if isinstance(each[1], ImageBlock)]
        return [_image(each, f"{path}.content[{number}]") for number, each in found if isinstance(each, ImageBlock)]


def _shown(turns: Sequence[Turn]) -> Iterator[tuple[int, Turn]]:
    """Yield the turns that the model gets, with their places."""
    last = max((index for index, turn in enumerate(turns) if turn.role == "user"), default=-1)
    for index, turn in enumerate(turns):
        if turn.role != "system" or turn.clear_at != "next_user_message" or index > last:
            yield index, turn


def _user_message(texts: Sequence[str], parts: Sequence[str | ImagePart]) -> ChatMessage:
    has_images = any(isinstance(each, ImagePart) for each in parts)
    return ChatMessage("user", _BETWEEN_TURNS.join(texts), parts=tuple(parts) if has_images else ())


def _image(block: ImageBlock, path: str) -> ImagePart:
    source = block.source
    if source.type == "base64":
        if source.data is None:
            raise invalid(f"{path}.source.data", f"{path}.source.data is required where its type is base64")
        return ImagePart(f"data:;base64,{source.data}", f"{path}.source.data")
    if source.url is None:
        raise invalid(f"{path}.source.url", f"{path}.source.url is required where its type is url")
    return ImagePart(source.url, f"{path}.source.url")


def _blocks(turn: Turn) -> Sequence[Block]:
    return () if isinstance(turn.content, str) else turn.content


def _place(index: int, number: int) -> str:
    return f"messages[{index}].content[{number}]"


def _misplaced(index: int, number: int, kind: str, role: str) -> SluiceError:
    path = f"{_place(index, number)}.type"
    return invalid(path, f"{path} may be {kind!r} only where the role is {role}")
