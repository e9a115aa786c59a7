"""What protocols with tools share: bounds, names, and how the reasoning is switched on and off."""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Discriminator, Tag

from gateway.http.parsing import quote_value, text_or_object, union_error
from sluice.errors import invalid

MAX_TOOLS = 128
"""Most tools of one request: OpenAI's limit."""
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Arguments by which the chat templates of Qwen and DeepSeek switch the reasoning on and off."""
MAX_TOOL_NAME_CHARS = 128
"""Most characters of a tool's name: Anthropic's and MCP's limit. OpenAI's own is 64, and its clients send longer ones
of MCP servers elsewhere."""
TOOL_NAME_HELP = f"Of letters, digits, _, - and ., at most {MAX_TOOL_NAME_CHARS}."
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
