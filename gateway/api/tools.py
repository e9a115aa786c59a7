"""What protocols with tools share: bounds, names, long schemas, and how the reasoning is switched on and off."""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Discriminator, Tag

from sluice.errors import SluiceError, invalid
from sluice.gateway.front.http.parsing import quote_value, relaxed_parts, text_or_object, union_error
from sluice.gateway.front.long_work import breathe, run_aside
from sluice.pipelines.chat.formats import parse_tools
from sluice.pipelines.text.stream import sent_prompt
from sluice.pipelines.text.types import Conversation, TextRequest

T = TypeVar("T")

MAX_TOOLS = 128
"""Most tools of one request: OpenAI's limit."""
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Arguments by which the chat templates of Qwen and DeepSeek switch the reasoning on and off."""
MAX_TOOL_NAME_CHARS = 128
"""Most characters of a tool's name: Anthropic's and MCP's limit. OpenAI's own is 64, and its clients send longer ones
of MCP servers elsewhere."""
TOOL_NAME_HELP = f"Of letters, digits, _, - and ., at most {MAX_TOOL_NAME_CHARS}."
SCHEMA_FIELDS = frozenset(
    {
        *("tools", "functions", "response_format", "structured_outputs", "guided_json", "structural_tag"),
        *("text", "output_config", "format"),
    }
)
"""Fields of all protocols that have schemas."""
_MANY_VALUES = 512
"""Number of values in schemas from which rewriting them takes a few milliseconds."""
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_TOOL_NAME_CHARS}}}")


_VALUES = frozenset(("const", "default", "enum", "examples", "example"))
"""Keywords whose values are no schemas, and may be null."""


def _without_nulls(schema: Any) -> Any:
    """Return a JSON schema without keywords that are null, as clients write those that they leave out."""
    if isinstance(schema, list):
        return [_without_nulls(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value if name in _VALUES else _without_nulls(value)
        for name, value in schema.items()
        if value is not None or name in _VALUES
    }


ToolSchema = Annotated[dict[str, Any], AfterValidator(_without_nulls)]
"""The JSON schema of a function's arguments."""
SentArguments = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
    Discriminator(text_or_object, **union_error("an object, or the text of one")),
]
"""The arguments of an earlier call, with what models and clients write beside OpenAI's text of an object: the object
itself, and any text, as of a call that was cut off."""


def arguments_text(arguments: object) -> str:
    """Return the arguments of a call as text: what is text already as it is, since models write more than JSON."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def check_tool_names(names: Sequence[str], path: str | Sequence[str]) -> None:
    """Raise INVALID for the name of a tool that is none, or another tool's. `path` has {} for its index, or is the path
    of each."""
    for index, name in enumerate(names):
        place = path.format(index) if isinstance(path, str) else path[index]
        if not _NAME.fullmatch(name):
            size = f"1 to {MAX_TOOL_NAME_CHARS}"
            raise invalid(place, f"{place} must have {size} letters, digits, _, - and ., got {quote_value(name)}")
        if names.index(name) < index:
            raise invalid(place, f"{place} is {quote_value(name)} as that of another tool; names must differ")


async def parse_with_schemas(fields: BaseModel, parse: Callable[[], T], request_of: Callable[[T], TextRequest]) -> T:
    """Return what `parse` returns. Where the fields have long schemas it runs aside, and those are rewritten there: who
    asks for the tools and the warnings of the parsed request finds them done."""
    if not has_many_values([getattr(fields, name, None) for name in SCHEMA_FIELDS]):
        return parse()
    return await run_aside(partial(_parse_in_pieces, parse, request_of))


def _parse_in_pieces(parse: Callable[[], T], request_of: Callable[[T], TextRequest]) -> T:
    parsed = parse()
    request = request_of(parsed)
    if (grammar := request.sampling.get("grammar")) is not None:
        relaxed_parts(grammar)
    prompt = sent_prompt(request.prompt)
    with suppress(SluiceError):  # which whoever asks for the tools raises, in the protocol's words
        for tool in prompt.options.tools if isinstance(prompt, Conversation) else ():
            breathe()
            parse_tools([tool])
    return parsed


def has_many_values(sent: Any, most: int = _MANY_VALUES) -> bool:
    """Whether there are more values within a value than can be looked at on the event loop."""
    pending, num_found = [sent], 0
    while pending:
        value = pending.pop()
        if isinstance(value, BaseModel):
            value = value.__dict__
        if isinstance(value, dict | list):
            num_found += len(value)
            if num_found > most:
                return True
            pending.extend(value.values() if isinstance(value, dict) else value)
    return False
