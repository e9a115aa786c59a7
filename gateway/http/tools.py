"""What protocols with tools share: bounds, names, long schemas, and how the reasoning is switched on and off."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel

from gateway.http.parsing import quote_value, relaxed_parts
from gateway.long_work import breathe, run_aside
from pipelines.chat.formats import parse_tools
from pipelines.text.stream import sent_prompt
from pipelines.text.types import Conversation, TextRequest
from sluice.errors import SluiceError, invalid

T = TypeVar("T")

MAX_TOOLS = 128
"""Most tools of one request: OpenAI's limit."""
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Arguments by which the chat templates of Qwen and DeepSeek switch the reasoning on and off."""
SCHEMA_FIELDS = frozenset(
    {
        *("tools", "functions", "response_format", "structured_outputs", "guided_json", "structural_tag"),
        *("text", "output_config", "format"),
    }
)
"""Fields of all protocols that have schemas."""
_MANY_VALUES = 512
"""Number of values in schemas from which rewriting them takes a few milliseconds."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def check_tool_names(names: Sequence[str], path: str) -> None:
    """Raise INVALID for the name of a tool that is none, or another tool's. `path` has {} for its index."""
    for index, name in enumerate(names):
        place = path.format(index)
        if not _NAME.fullmatch(name):
            raise invalid(place, f"{place} must have 1 to 64 letters, digits, _, - and ., got {quote_value(name)}")
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
