"""Headers of HTTP requests and metadata of gRPC calls that go along with a request as its parameters."""

from collections.abc import Iterable

import re2

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.calls import current_identity

_RESERVED = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)
"""Parameters with a meaning of their own, which no header may set."""
_KEYS = frozenset({"authorization", "x-api-key"})
"""Where the server itself asks for a key, models do not see it."""
_RESERVED_PREFIX = "triton_"


class ForwardedHeaders:
    """Chooses headers by `pattern`, a regular expression of RE2 that may match anywhere in a name, in any case.

    None forwards no headers.
    """

    def __init__(self, pattern: str | None) -> None:
        self._pattern = re2.compile("(?i)" + pattern) if pattern else None

    def __bool__(self) -> bool:
        return self._pattern is not None

    def choose(self, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Return the headers that are forwarded. Raises INVALID for the name of a parameter with its own meaning."""
        if self._pattern is None:
            return {}
        secret = _KEYS if current_identity() is not None else frozenset()
        chosen = {name: value for name, value in headers if self._pattern.search(name) and name.lower() not in secret}
        for name in chosen:
            if name in _RESERVED or name.startswith(_RESERVED_PREFIX):
                message = f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
                raise SluiceError(ErrorCode.INVALID, message)
        return chosen
