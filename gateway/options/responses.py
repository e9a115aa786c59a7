"""Options of /v1/responses and /v1/conversations."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sluice.gateway.options.option import integer, option, seconds, size

NONE = "none"
_REDIS = ("redis", "rediss")


def parse_store_place(text: str) -> str:
    """Parse the path of a file, the URL of a Redis, or `none`."""
    allowed = "the path of a file, redis://HOST:PORT/DB or none"
    try:
        parts = urlsplit(text)
        is_usable = parts.scheme in _REDIS and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        raise ValueError(allowed) from None
    if not (is_usable or "://" not in text) or not text or not text.isprintable():
        raise ValueError(allowed)
    return text


@dataclass(frozen=True, slots=True)
class ResponsesOptions:
    """Responses and conversations: what is kept for clients that come back to them"""

    store: str | None = option(
        "--responses-store",
        None,
        parse_store_place,
        "PATH|URL|none",
        "store of responses and conversations: a SQLite file, or a Redis that gateways share; none keeps nothing. "
        "Default: responses.sqlite in --state-path",
        secret=True,
    )
    ttl_s: float = option(
        "--responses-ttl-secs",
        30 * 86_400.0,
        seconds(1),
        "SECONDS",
        "time for which a response or a conversation is kept after its last change",
    )
    max_records: int = option(
        "--responses-max-count",
        100_000,
        integer(1),
        "COUNT",
        "most responses and conversations in the SQLite file; past that the oldest are deleted",
    )
    max_bytes: int = option(
        "--responses-max-size",
        1 << 30,
        size(1 << 20),
        "SIZE",
        "most bytes of them together, and of one. Redis has a limit of its own, maxmemory, for all together",
    )

    def store_place(self, state_folder: Path) -> str | None:
        """Return the file or URL of the store; None where nothing is kept."""
        if self.store is None:
            return str(state_folder / "responses.sqlite")
        return None if self.store == NONE else self.store
