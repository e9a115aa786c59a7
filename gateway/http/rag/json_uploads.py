"""Documents as JSON, and as JSON lines."""

import io
from collections.abc import Iterator
from dataclasses import dataclass

import orjson

from gateway.http.parsing import parse_body, quote_value
from gateway.http.rag.schemas import MAX_DOCUMENTS, DocumentItem, DocumentsRequest, MetadataObject
from pipelines.rag.documents.jsonl import JsonLines
from pipelines.rag.documents.parse import format_of
from pipelines.rag.types import DocumentFormat, Metadata
from pipelines.rag.upload import Upload
from sluice.errors import SluiceError, invalid

_OF_ONE = ("id", "text", "format", "title", "metadata")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What was to be a document and is none."""

    id: str
    error: SluiceError


def json_uploads(body: bytes, is_strict: bool) -> tuple[list[Upload | Unreadable], list[str]]:
    """The documents, and the paths of unknown fields. Raises INVALID for fields that are missing or wrong."""
    fields, ignored = parse_body(DocumentsRequest, body, is_strict)
    return [_upload(item) for item in _items(fields)], ignored


def line_uploads(body: bytes) -> Iterator[Upload | Unreadable]:
    """A document a line. What a bad line says is an error of its own. Raises INVALID for too many lines."""
    check_count(body.count(b"\n"))
    return _of_lines(body)


def check_count(num_documents: int) -> None:
    """Raises INVALID for more documents than one request may bring."""
    if num_documents > MAX_DOCUMENTS:
        message = f"a request may bring at most {MAX_DOCUMENTS} documents, got {num_documents}; send several requests"
        raise invalid("documents", message)


def _of_lines(body: bytes) -> Iterator[Upload | Unreadable]:
    lines = JsonLines(io.BytesIO(body))
    while True:
        try:
            yield next(lines)
        except StopIteration:
            return
        except SluiceError as error:
            yield Unreadable(f"line {lines.line}", error)


def read_metadata(text: str) -> Metadata:
    """Of a query parameter or a form field, as JSON; none for "". Raises INVALID."""
    if not text:
        return {}
    try:
        given = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise invalid("metadata", f"metadata must be a JSON object, got {quote_value(text)} ({error})") from None
    fields, _ = parse_body(MetadataObject, orjson.dumps({"metadata": given}), is_strict=True)
    return fields.metadata


def _items(fields: DocumentsRequest) -> list[DocumentItem]:
    given = [name for name in _OF_ONE if getattr(fields, name) is not None]
    if fields.documents is not None:
        if given:
            raise invalid(given[0], f"{given[0]} must stand in one of the documents, not beside them")
        return fields.documents
    for name in ("id", "text"):
        if name not in given:
            raise invalid(name, f"{name} is required: send id and text of a document, or several under documents")
    return [DocumentItem.model_validate({name: getattr(fields, name) for name in given})]


def _upload(item: DocumentItem) -> Upload | Unreadable:
    content = item.text.encode()
    try:
        format = DocumentFormat(item.format) if item.format is not None else format_of("", item.id, content)
    except SluiceError as error:
        return Unreadable(item.id, error)
    return Upload(item.id, content, format, item.title or "", item.metadata or {})
