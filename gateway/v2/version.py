"""The version of a model as clients write it."""

import re

from serving.request import LATEST
from sluice.errors import ErrorCode, SluiceError

_LEADING_INTEGER = re.compile(r"\s*([+-]?\d+)", re.ASCII)
_HIGHEST = 2**63 - 1
_MOST_DIGITS = 4000
"""More than any version has, and fewer than Python refuses to read."""


def parse_version(text: str) -> int:
    """The version that `text` names, by C's `strtol` as Triton reads it; empty is LATEST. Raises INVALID."""
    if not text:
        return LATEST
    match = _LEADING_INTEGER.match(text)
    if match is None or len(match[1]) > _MOST_DIGITS or abs(version := int(match[1])) > _HIGHEST:
        message = (
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        )
        raise SluiceError(ErrorCode.INVALID, message)
    if version < 0:
        message = f"invalid model version specified '{text}' , version should be an integral value > 0"
        raise SluiceError(ErrorCode.INVALID, message)
    return version
