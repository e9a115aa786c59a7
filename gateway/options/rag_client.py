"""Which server `sluice rag` talks to, and with which keys."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from gateway.options.option import option


def web_address(text: str) -> str:
    """The URL of an HTTP server, without the slash at its end."""
    allowed = "the URL of a server, such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(text)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        raise ValueError(allowed) from None
    if not is_one or parts.query or parts.fragment or not text.isprintable():
        raise ValueError(allowed)
    return text.rstrip("/")


def header_text(text: str) -> str:
    """What a header can carry."""
    if not text.strip() or not text.isascii() or not text.isprintable():
        raise ValueError("printable ASCII text that is not empty")
    return text


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The server"""

    url: str = option(
        "--url", "http://127.0.0.1:8000", web_address, "URL", "the server's address. Default: http://127.0.0.1:8000"
    )
    api_key: str | None = option(
        "--api-key",
        None,
        header_text,
        "KEY",
        "the server's API key, where it asks for one. Better set SLUICE_API_KEY: every user of the machine can read a "
        "command line",
        secret=True,
    )
    collection_key: str | None = option(
        "--key",
        None,
        header_text,
        "KEY",
        "the collection's owner key; a collection that ingest makes is owned by it. Better set SLUICE_COLLECTION_KEY",
        secret=True,
        variable="SLUICE_COLLECTION_KEY",
    )
