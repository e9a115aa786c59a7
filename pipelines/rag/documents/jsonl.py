"""A batch of documents, one JSON object a line."""

from collections.abc import Iterable, Iterator
from typing import Any, Self

import orjson

from pipelines.rag.types import DocumentFormat, Metadata
from pipelines.rag.upload import Upload
from sluice.errors import SluiceError, invalid

_MEDIA_TYPES = frozenset(
    [
        "application/jsonl",
        "application/jsonlines",
        "application/ndjson",
        "application/x-jsonlines",
        "application/x-ndjson",
    ]
)
_SUFFIXES = (".jsonl", ".ndjson")
_FORMATS = {format.value: format for format in DocumentFormat if format is not DocumentFormat.PDF}
_BOM = b"\xef\xbb\xbf"


def is_jsonl(content_type: str, filename: str) -> bool:
    """Whether what came is a batch, by its content type or its file name."""
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type in _MEDIA_TYPES or filename.lower().endswith(_SUFFIXES)


class JsonLines(Iterator[Upload]):
    """The documents of `lines`: a binary file, or any iterable of lines. Blank ones are passed over.

    A line is `{"id": "...", "text": "..."}`, `content` for `text` too, with `title`, `format` (text, markdown or html;
    text where it is left out) and `metadata` if wanted; other fields with a scalar value join the metadata, and those
    without are left out. A bad line raises INVALID (param "content"), which names it; whoever wants the lines after
    it asks for the next one.
    """

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = iter(lines)
        self.line = 0
        """The number of the line that was read last, from 1."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Upload:
        for line in self._lines:
            self.line += 1
            line = line.removeprefix(_BOM) if self.line == 1 else line
            if line.strip():
                return self._upload(line)
        raise StopIteration

    def _upload(self, line: bytes) -> Upload:
        try:
            return _upload_of(orjson.loads(line))
        except orjson.JSONDecodeError as error:
            raise invalid("content", f"line {self.line} is not JSON: {error}") from None
        except SluiceError as error:
            raise invalid("content", f"line {self.line}: {error.message}") from None


def _upload_of(given: Any) -> Upload:
    if not isinstance(given, dict):
        raise invalid("content", f"expected an object with id and text, got {_named(given)}")
    rest = dict(given)
    document_id = rest.pop("id", None)
    if isinstance(document_id, int) and not isinstance(document_id, bool):
        document_id = str(document_id)
    format = _given(rest, "format", DocumentFormat.TEXT.value)
    if not isinstance(format, str) or format not in _FORMATS:
        raise invalid("content", f"format must be one of {', '.join(_FORMATS)}, got {_named(format)}")
    return Upload(
        id=_string("id", document_id),
        content=_text_of(rest).encode(),
        format=_FORMATS[format],
        title=_string("title", _given(rest, "title", "")),
        metadata=_metadata_of(rest),
    )


def _given(rest: dict[str, Any], name: str, default: object) -> Any:
    """The field, taken out of `rest`; null is as good as left out."""
    value = rest.pop(name, None)
    return default if value is None else value


def _text_of(rest: dict[str, Any]) -> str:
    given = [rest.pop(name) for name in ("text", "content") if name in rest]
    if len(given) == 2:
        raise invalid("content", "text and content are the same field: send one")
    return _string("text", given[0] if given else None)


def _metadata_of(rest: dict[str, Any]) -> Metadata:
    own = _given(rest, "metadata", {})
    if not isinstance(own, dict):
        raise invalid("content", f"metadata must be an object, got {_named(own)}")
    for key, value in own.items():
        if not _is_scalar(value):
            raise invalid("content", f"metadata.{key} must be a string, number, boolean or null, got {_named(value)}")
    return {key: value for key, value in rest.items() if _is_scalar(value)} | own


def _string(name: str, value: object) -> str:
    if not isinstance(value, str):
        came = "nothing" if value is None else _named(value)
        raise invalid("content", f"{name} must be a string, got {came}")
    return value


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _named(value: object) -> str:
    shown = orjson.dumps(value).decode()
    return shown if len(shown) <= 80 else f"{shown[:79]}…"
