"""The headers with which a client makes a request resumable, comes back to a stream, or names a request."""

import re
from typing import NamedTuple

from starlette.types import Scope

from sluice.errors import invalid

RESUME_HEADER = "x-sluice-resume"
LAST_EVENT_HEADER = "last-event-id"
KEY_HEADER = "idempotency-key"
MAX_KEY_CHARS = 255
KEPT_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
        *("/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score", "/classify", "/pooling"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
    }
)
"""Paths of requests that may be kept: those that make a model answer."""
HEADERS = frozenset(each.encode() for each in (RESUME_HEADER, LAST_EVENT_HEADER, KEY_HEADER))
"""Names of the headers that mean anything here."""
_EVENT_ID = re.compile(r"([0-9a-f]{32})(?:\.(\d{1,6}))?:(\d{1,12})", re.ASCII)
_SHOWN_CHARS = 60


class EventId(NamedTuple):
    """The id of an event: its stream, how many gateways had taken that over before it, and its number, from 1 on."""

    stream_id: str
    num_takeovers: int
    number: int


class Wish(NamedTuple):
    """A client's wishes for its answer. `last_event` is the last one that it has of a stream; `key` "": none."""

    is_resumable: bool
    last_event: EventId | None
    key: str


def read_wish(scope: Scope) -> Wish | None:
    """Return what the headers of a request say; None for nothing. Raises INVALID, naming the header."""
    if scope["method"] != "POST" or scope["path"] not in KEPT_PATHS:
        return None
    sent = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in HEADERS}
    is_resumable = _read_switch(sent.get(RESUME_HEADER, "false"))
    last_event = parse_event_id(sent[LAST_EVENT_HEADER]) if sent.get(LAST_EVENT_HEADER) else None
    key = _read_key(sent[KEY_HEADER]) if KEY_HEADER in sent else ""
    return Wish(is_resumable, last_event, key) if is_resumable or last_event or key else None


def parse_event_id(text: str) -> EventId:
    """Return the parts of an event's id. Raises INVALID for what is none of ours."""
    found = _EVENT_ID.fullmatch(text)
    if found is None:
        what = f"the id of an event of this server (STREAM:NUMBER), got {text[:_SHOWN_CHARS]!r}"
        raise invalid(LAST_EVENT_HEADER, f"{LAST_EVENT_HEADER} must be {what}")
    return EventId(found[1], int(found[2] or 0), int(found[3]))


def _read_switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise invalid(RESUME_HEADER, f"{RESUME_HEADER} must be true or false, got {text[:_SHOWN_CHARS]!r}")
    return text.lower() == "true"


def _read_key(text: str) -> str:
    if not 0 < len(text) <= MAX_KEY_CHARS or not text.isascii() or not text.isprintable():
        what = f"1 to {MAX_KEY_CHARS} printable ASCII characters, got {len(text)}: {text[:_SHOWN_CHARS]!r}"
        raise invalid(KEY_HEADER, f"{KEY_HEADER} must be {what}")
    return text
