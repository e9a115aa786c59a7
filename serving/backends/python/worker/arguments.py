"""What models pass to `pb_utils`, checked where they do: what is wrong shall fail there, and not on its way."""

from collections.abc import Mapping
from operator import index
from typing import Any

from serving.backends.python.worker.errors import TritonModelException

Parameters = dict[str, bool | int | float | str]

UINT32 = 2**32 - 1
UINT64 = 2**64 - 1
INT64 = 2**63 - 1


def text(value: Any, what: str) -> str:
    """`bytes` are taken too, as the real server does: elements of a BYTES tensor are. Raises TypeError."""
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"{what} is a str, not {type(value).__name__}")
    return str(value)


def whole(value: Any, what: str, highest: int = UINT64, lowest: int = 0) -> int:
    """Raises TypeError for what is no integer, ValueError for one that is out of range."""
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{what} is an int, not {type(value).__name__}") from None
    if not lowest <= number <= highest:
        raise ValueError(f"{what} is from {lowest} to {highest}, not {number}")
    return number


def parameters(given: Any) -> Parameters:
    """Those of a request or a response. Raises TritonModelException in the real server's words.

    Beyond what that takes, values may be floats, as in the protocol.
    """
    if not isinstance(given, Mapping):
        raise TritonModelException(f"Expect parameters to be a dict, got {type(given)}")
    for key, value in given.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, (bool, int, float, str)):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
        if isinstance(value, int):
            whole(value, key, UINT64, -INT64)
    return dict(given)
