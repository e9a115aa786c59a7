"""The text of blocks that have no schema of their own: documents, search results, what tools of servers returned, and
types that are newer than this server."""

from collections.abc import Iterator, Mapping
from typing import Any

_TEXTS = (
    *("title", "context", "source", "url", "tool_name", "text", "stdout", "stderr", "error_code", "content"),
    *("tool_references", "tabs"),
)
"""Members whose text a model can read, in the order in which it is read. The others have none, or it is encrypted."""
PDF = "application/pdf"
_MAX_DEPTH = 8
"""Levels of blocks within blocks that are read. A web page in the result of a tool has 5."""


def read_block(sent: Any) -> Any:
    """Return a block in the form of `OtherBlock`."""
    if not isinstance(sent, Mapping):
        return sent
    kind, unread, source = sent.get("type"), list[str](), sent.get("source")
    texts = "\n".join(filter(None, _texts(sent, unread, _MAX_DEPTH)))
    block = {"type": kind, "text": f"\n{texts}\n" if texts else "", "unread": unread[0] if unread else "", "pdf": ""}
    if kind == "document" and isinstance(source, Mapping) and source.get("media_type") == PDF:
        block["pdf"] = data if isinstance(data := source.get("data"), str) else ""
    return block


def _texts(value: Any, unread: list[str], levels: int) -> Iterator[str]:
    """Yield the texts of a value, and note what is none in `unread`."""
    if isinstance(value, str):
        yield value
    elif not levels or not isinstance(value, list | Mapping):
        unread.append(type(value).__name__)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, unread, levels - 1)
    elif value.get("type") in ("base64", "url", "file", "image"):
        unread.append(str(value.get("media_type") or value["type"])[:80])
    elif value.get("type") == "text" and "data" in value:  # the source of a document
        yield from _texts(value["data"], unread, levels - 1)
    else:
        for name in _TEXTS:
            if value.get(name) is not None:
                yield from _texts(value[name], unread, levels - 1)
