"""Reads JSON lines: a batch of documents, one JSON object a line."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import orjson

from sluice.errors import SluiceError, invalid
from sluice.pipelines.rag.documents.extract import UTF_8
from sluice.pipelines.rag.types import DocumentFormat, Metadata, Upload

_MEDIA_TYPES = {f"application/{name}" for name in ("jsonl", "jsonlines", "ndjson", "x-jsonlines", "x-ndjson")}
_SUFFIXES = (".jsonl", ".ndjson")
_FORMATS = {format.value: format for format in DocumentFormat if format is not DocumentFormat.PDF}
_BOM = b"\xef\xbb\xbf"


def is_jsonl(content_type: str, filename: str) -> bool:
    """Whether an upload is JSON lines, by its content type or its file name."""
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type in _MEDIA_TYPES or filename.lower().endswith(_SUFFIXES)


class JsonLines(Iterator[Upload]):
    """Iterates over the documents in `lines`, a binary file or any iterable of lines. Blank lines are skipped.

    A line is `{"id": "...", "text": "..."}`, where `text` may be called `content`, with optional `title`, `format`
    (text, markdown or html; default text) and `metadata`. Other fields join the metadata if their value is a scalar,
    else they are ignored. A bad line raises INVALID (param "content"), which names the line; iteration can go on after
    it.
    """

    def __init__(self, lines: Iterable[bytes], parse: Callable[[bytes], Any] = orjson.loads) -> None:
        """`parse` returns the value in a line. Raises ValueError."""
        self._lines = iter(lines)
        self._parse = parse
        self.line = 0
        """The number of the last line read, from 1."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Upload:
        for line in self._lines:
            self.line += 1
            line = line.removeprefix(_BOM) if self.line == 1 else line
            if line.strip():
                return self._parse_line(line)
        raise StopIteration

    def _parse_line(self, line: bytes) -> Upload:
        try:
            return _parse_upload(self._parse(line))
        except ValueError as error:
            raise invalid("content", f"line {self.line} is not JSON: {error}") from None
        except SluiceError as error:
            raise invalid("content", f"line {self.line}: {error.message}") from None


def _parse_upload(value: Any) -> Upload:
    if not isinstance(value, dict):
        raise invalid("content", f"expected an object with id and text, got {_shown(value)}")
    fields = dict(value)
    document_id = fields.pop("id", None)
    if isinstance(document_id, int) and not isinstance(document_id, bool):
        document_id = str(document_id)
    format = _pop_field(fields, "format", DocumentFormat.TEXT.value)
    if not isinstance(format, str) or format not in _FORMATS:
        raise invalid("content", f"format must be one of {', '.join(_FORMATS)}, got {_shown(format)}")
    return Upload(
        id=_check_string("id", document_id),
        content=_pop_text(fields).encode(),
        format=_FORMATS[format],
        title=_check_string("title", _pop_field(fields, "title", "")),
        metadata=_parse_metadata(fields),
        encoding=UTF_8,
    )


def _pop_field(fields: dict[str, Any], name: str, default: object) -> Any:
    """Remove a field and return its value, or `default` if the field is missing or null."""
    value = fields.pop(name, None)
    return default if value is None else value


def _pop_text(fields: dict[str, Any]) -> str:
    texts = [fields.pop(name) for name in ("text", "content") if name in fields]
    if len(texts) == 2:
        raise invalid("content", "text and content are the same field: send one")
    return _check_string("text", texts[0] if texts else None)


def _parse_metadata(fields: dict[str, Any]) -> Metadata:
    """Return the field `metadata` together with the remaining fields that are scalars."""
    metadata = _pop_field(fields, "metadata", {})
    if not isinstance(metadata, dict):
        raise invalid("content", f"metadata must be an object, got {_shown(metadata)}")
    for key, value in metadata.items():
        if not _is_scalar(value):
            raise invalid("content", f"metadata.{key} must be a string, number, boolean or null, got {_shown(value)}")
    return {key: value for key, value in fields.items() if _is_scalar(value)} | metadata


def _check_string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise invalid("content", f"{name} must be a string, got {'nothing' if value is None else _shown(value)}")
    return value


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _shown(value: object) -> str:
    shown = orjson.dumps(value).decode()
    return shown if len(shown) <= 80 else f"{shown[:79]}…"
