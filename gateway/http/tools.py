"""What protocols with tools share: bounds, names, and how the reasoning is switched on and off."""

import re
from collections.abc import Sequence

from gateway.http.parsing import quote_value
from sluice.errors import invalid

MAX_TOOLS = 128
"""Most tools of one request: OpenAI's limit."""
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Arguments by which the chat templates of Qwen and DeepSeek switch the reasoning on and off."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def check_tool_names(names: Sequence[str], path: str) -> None:
    """Raise INVALID for the name of a tool that is none, or another tool's. `path` has {} for its index."""
    for index, name in enumerate(names):
        place = path.format(index)
        if not _NAME.fullmatch(name):
            raise invalid(place, f"{place} must have 1 to 64 letters, digits, _, - and ., got {quote_value(name)}")
        if names.index(name) < index:
            raise invalid(place, f"{place} is {quote_value(name)} as that of another tool; names must differ")
