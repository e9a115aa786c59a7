"""What OpenVINO says went wrong, without the places in its source that it begins with."""

import re

from sluice.errors import ErrorCode, SluiceError

_PLACE = re.compile(r"^(?:Exception from .*:|Check '.*' failed at .*:|Caught exception:\s*)\s*", re.MULTILINE)
_UNCONVERTED = re.compile(r"(?:No conversion rule found for operations|Conversion is failed for): (.+)")


def reason_of(error: Exception) -> str:
    """In one line."""
    return " ".join(_PLACE.sub("", str(error)).split())


def reading_failure_of(error: Exception) -> SluiceError:
    """UNIMPLEMENTED where OpenVINO lacks operations, which are named; else INTERNAL."""
    found = _UNCONVERTED.search(str(error))
    if found is None:
        return failure_of(error, "reading model")
    return SluiceError(ErrorCode.UNIMPLEMENTED, f"OpenVINO cannot convert these operations of the model: {found[1]}")


def failure_of(error: Exception, doing: str) -> SluiceError:
    """INTERNAL; `doing` in Triton's words: reading model, loading model …"""
    return SluiceError(ErrorCode.INTERNAL, f"openvino error in {doing} : {reason_of(error)}")
