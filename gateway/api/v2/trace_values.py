"""The settings of Triton's trace extension: their names, their values, and how clients write them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sluice.errors import ErrorCode, SluiceError, invalid

TraceValue = str | list[str]
LEVELS = ("TIMESTAMPS", "TENSORS")
TRACE_SETTINGS = ("trace_file", "trace_level", "trace_rate", "trace_count", "log_frequency")
"""Names of the settings, in the order in which Triton checks them."""
TRACE_FIELDS = {"trace_level": "levels", "trace_rate": "rate", "trace_count": "count", "log_frequency": "log_frequency"}
_INTEGER = re.compile(r"\s*[+-]?\d+", re.ASCII)
_MAX_INT32 = 2**31 - 1
_RANGES = {"trace_rate": (0, 2**32 - 1), "trace_count": (-1, _MAX_INT32), "log_frequency": (0, 2**32 - 1)}
"""The ranges that Triton's errors name. It accepts nothing above 32 bits with a sign."""
UNCHANGED: Any = object()
CLEARED: Any = object()
"""Values that leave a setting as it is, and that take a change back."""


@dataclass(frozen=True, slots=True)
class TraceSetting:
    """The setting of a model or of all models. `count` -1: no limit. `log_frequency` 0: all traces go into one file."""

    levels: frozenset[str] = frozenset()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


def parse_setting(name: str, value: TraceValue | None) -> Any:
    """Return the value of a setting. Raises SluiceError in Triton's words."""
    if name == "trace_file":
        text = "trace file location can not be updated through network protocol"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, text)
    if value is None:
        return CLEARED
    if name == "trace_level":
        return _parse_levels(value if isinstance(value, list) else [str(value)])
    return _parse_number(name, value[0] if isinstance(value, list) and value else str(value))


def _parse_levels(values: Sequence[str]) -> Any:
    if "OFF" in values:
        if len(values) != 1:
            raise invalid("trace_level", "Expect only one trace level 'OFF' is specified")
        return frozenset[str]()
    known = frozenset(values) & frozenset(LEVELS)
    return known or UNCHANGED


def _parse_number(name: str, text: str) -> int:
    match = _INTEGER.match(text)
    if match is None:
        raise invalid(name, f"Unable to parse '{name}', got: {text}")
    value = int(match[0]) if len(match[0]) < 20 else _MAX_INT32 + 1
    lowest, highest = _RANGES[name]
    if name == "trace_count" and -_MAX_INT32 <= value < lowest:
        raise invalid(name, f"Unable to parse 'trace_count'. Expecting value >= -1, got:{text}")
    if not lowest <= value <= _MAX_INT32:
        reach = f"value is out of range [ {lowest}, {highest} ]"
        raise invalid(name, f"Unable to parse '{name}', {reach}, got: {text}")
    return value
