"""What clients are told of where an answer comes from, and its JSON form in tensors and over HTTP."""

from collections.abc import Sequence
from typing import Any

import msgspec


class Source(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A chunk that the language model reads, or was found: a document, a heading and a range of characters.

    `id` is the number that the prompt calls it by, from 1; 0, which JSON leaves out, before there is a prompt.
    """

    id: int = 0
    document: str
    title: str = ""
    heading: str = ""
    start: int
    end: int
    score: float
    similarity: float | None = None
    metadata: dict[str, str | int | float | bool | None] = {}
    text: str


class Citation(msgspec.Struct, frozen=True, kw_only=True):
    """The characters `start` to `end` of an answer rest on the source with the id `source`.

    `by` is marker where the model said so, overlap where its words are the source's.
    """

    source: int
    start: int
    end: int
    by: str


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Source)


def encoded(source: Source) -> bytes:
    """As an element of a BYTES tensor."""
    return _ENCODER.encode(source)


def decoded(element: bytes) -> Source:
    """Raises msgspec.ValidationError or msgspec.DecodeError for what is no source."""
    return _DECODER.decode(element)


def as_objects(items: Sequence[Source | Citation]) -> list[dict[str, Any]]:
    """As JSON objects of an answer."""
    return [msgspec.to_builtins(item) for item in items]
