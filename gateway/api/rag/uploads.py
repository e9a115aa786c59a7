"""Reads the documents in a request's body: JSON, JSON lines, forms with files, or one document as it is."""

import asyncio
import io
import sys
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from typing import Any

import orjson
from fastapi import Request
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.api.rag.schemas import MAX_DOCUMENTS, DocumentItem, DocumentsRequest, MetadataObject
from sluice.gateway.front.http.json_pieces import INLINE_BYTES, DocumentLimits, parse_pieces
from sluice.gateway.front.http.parsing import parse_body, quote_name, quote_value
from sluice.gateway.front.http.request import read_body
from sluice.gateway.front.long_work import run_aside
from sluice.gateway.options.http import HttpOptions
from sluice.pipelines.rag.documents.extract import UTF_8, find_encoding
from sluice.pipelines.rag.documents.jsonl import JsonLines, is_jsonl
from sluice.pipelines.rag.documents.parse import detect_format
from sluice.pipelines.rag.types import DocumentFormat, Metadata, Upload

JSON = "application/json"
FORM = "multipart/form-data"
MAX_FILES = 1000
_UNSPECIFIC_TYPES = ("application/octet-stream", "application/x-www-form-urlencoded")
"""Content types that clients send for any content; curl's --data-binary sends the latter."""
_BINARY = "binary"
"""The charset that `file --mime` prints of what is no text."""
_ASCII = ("us-ascii", "ascii")
_DOCUMENT_FIELDS = ("id", "text", "format", "title", "metadata")
_FORM_FIELDS = ("id", "title", "metadata")
_LIMITS = DocumentLimits(values=MAX_DOCUMENTS * 80, members=MAX_DOCUMENTS * 80)
"""Limits of JSON with as many documents as a request may bring, and as much metadata as each may have."""
_PIECE_BYTES = 64 << 10
"""Bytes of a form parsed at a time, so that the event loop is not blocked for long."""


@dataclass(frozen=True, slots=True)
class UnreadableUpload:
    """A document that could not be read, with the error."""

    id: str
    error: SluiceError


async def read_upload(request: Request, options: HttpOptions, document_id: str) -> Upload:
    """Read a body that is one document. Its format comes from the content type, else from the id's ending."""
    media_type = _media_type(request)
    if media_type in (JSON, FORM) or is_jsonl(media_type, ""):
        takes = "POST to the collection's documents takes JSON, JSON lines and forms"
        raise invalid("content-type", f"the body must be the document itself, got {media_type}; {takes}")
    query = request.query_params
    metadata = _parse_metadata(query.get("metadata", ""))
    content = await read_body(request, options.max_input_bytes)
    content_type = "" if media_type in _UNSPECIFIC_TYPES else media_type
    encoding = _encoding(request.headers.get("content-type", ""))
    format = await run_aside(lambda: detect_format(content_type, document_id, content, encoding))
    return Upload(document_id, content, format, query.get("title", ""), metadata, encoding)


async def read_uploads(request: Request, options: HttpOptions) -> tuple[Iterable[Upload | UnreadableUpload], list[str]]:
    """Read the documents in the body. Also returns the names of unknown fields.

    Raises INVALID for a body that cannot be read at all; one bad document in it becomes an UnreadableUpload.
    """
    media_type = _media_type(request)
    if media_type == JSON or is_jsonl(media_type, ""):
        _check_utf_8(request.headers["content-type"])
    if media_type == FORM:
        body = await read_body(request, options.max_input_bytes)
        return await _read_form(request.headers, body, options.is_strict)
    if media_type == JSON:
        body = await read_body(request, options.max_input_bytes)
        return await run_aside(lambda: _read_json(body, options.is_strict))
    if is_jsonl(media_type, ""):
        body = await read_body(request, options.max_input_bytes)
        return await run_aside(lambda: _read_lines(body)), []
    document_id = request.query_params.get("id", "")
    if not document_id:
        what = f"a body of type {quote_name(media_type)}" if media_type else "a body without content type"
        raise invalid("id", f"id is required: {what} is one document, which ?id=NAME names")
    return [await read_upload(request, options, document_id)], []


def _media_type(request: Request) -> str:
    """Return the content type without parameters, in lower case."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _charset(content_type: str) -> str:
    header = Message()
    header["content-type"] = content_type
    return header.get_content_charset("")


def _check_utf_8(content_type: str) -> None:
    """Raise INVALID for JSON in another encoding."""
    charset = _charset(content_type)
    if charset and find_encoding(charset) != UTF_8 and charset not in _ASCII:
        raise invalid("content-type", f"JSON must be UTF-8, got charset {quote_name(charset)}")


def _encoding(content_type: str) -> str:
    """Return the encoding that the charset of a document's content type means, "" for none. Raises INVALID."""
    charset = _charset(content_type)
    encoding = find_encoding(charset)
    if charset in ("", _BINARY) or encoding:
        return encoding
    label = quote_name(charset)
    raise invalid(
        "content-type", f"charset {label} is no encoding that is read, by the labels of the Encoding Standard"
    )


def _parse_metadata(text: str) -> Metadata:
    """Parse the JSON of a query parameter or a form field; "" has no metadata. Raises INVALID."""
    if not text:
        return {}
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise invalid("metadata", f"metadata must be a JSON object, got {quote_value(text)} ({error})") from None
    fields, _ = parse_body(MetadataObject, orjson.dumps({"metadata": value}), is_strict=True)
    return fields.metadata


def _check_count(num_documents: int) -> None:
    """Raise INVALID for more documents than one request may bring."""
    if num_documents > MAX_DOCUMENTS:
        message = f"a request may bring at most {MAX_DOCUMENTS} documents, got {num_documents}; send several requests"
        raise invalid("documents", message)


def _read_json(body: bytes, is_strict: bool) -> tuple[list[Upload | UnreadableUpload], list[str]]:
    """Read documents from JSON. Also returns the paths of unknown fields. Raises INVALID for missing or bad fields."""
    fields, ignored = parse_body(DocumentsRequest, body, is_strict, _LIMITS)
    return [_build_upload(item) for item in _items(fields)], ignored


def _items(fields: DocumentsRequest) -> list[DocumentItem]:
    given = [name for name in _DOCUMENT_FIELDS if getattr(fields, name) is not None]
    if fields.documents is not None:
        if given:
            raise invalid(given[0], f"{given[0]} must stand in one of the documents, not beside them")
        return fields.documents
    for name in ("id", "text"):
        if name not in given:
            raise invalid(name, f"{name} is required: send id and text of a document, or several under documents")
    return [DocumentItem.model_validate({name: getattr(fields, name) for name in given})]


def _build_upload(item: DocumentItem) -> Upload | UnreadableUpload:
    content = item.text.encode()
    try:
        detected = item.format or detect_format("", item.id, content, UTF_8)
    except SluiceError as error:
        return UnreadableUpload(item.id, error)
    # JSON brings the text of a PDF, never the file.
    format = DocumentFormat.TEXT if detected == DocumentFormat.PDF else DocumentFormat(detected)
    return Upload(item.id, content, format, item.title or "", item.metadata or {}, UTF_8)


def _read_lines(body: bytes) -> list[Upload | UnreadableUpload]:
    """Read one document from each line; a bad line becomes an UnreadableUpload. Raises INVALID for too many lines."""
    _check_count(body.count(b"\n"))
    return list(_iterate_lines(body))


def _iterate_lines(body: bytes) -> Iterator[Upload | UnreadableUpload]:
    lines = JsonLines(io.BytesIO(body), _parse_line)
    while True:
        try:
            yield next(lines)
        except StopIteration:
            return
        except SluiceError as error:
            yield UnreadableUpload(f"line {lines.line}", error)


def _parse_line(line: bytes) -> Any:
    return orjson.loads(line) if len(line) <= INLINE_BYTES else parse_pieces(line, _LIMITS)


class _InMemoryParser(MultiPartParser):
    """Parses without temporary files: the body that the parts come from is in memory already."""

    spool_max_size = sys.maxsize


async def _read_form(
    headers: Headers, body: bytes, is_strict: bool
) -> tuple[list[Upload | UnreadableUpload], list[str]]:
    """Read a document from each file of a form (`curl -F file=@handbook.pdf`), with the file's name as its id.

    The field `metadata` applies to all files; `id` and `title` are for a form with one file. Files of JSON lines bring
    their own. Also returns the names of unknown fields. Raises INVALID.
    """
    form = await _parse_form(headers, body)
    try:
        items = form.multi_items()
        files = [value for _, value in items if isinstance(value, UploadFile)]
        fields = {name: value for name, value in items if isinstance(value, str)}
        _check_form(files, fields)
        metadata = _parse_metadata(fields.get("metadata", ""))
        uploads: list[Upload | UnreadableUpload] = []
        for file in files:
            uploads += await _read_file(file, fields, metadata)
            _check_count(len(uploads))
        return uploads, _unknown_fields(fields, is_strict)
    finally:
        await form.close()


async def _parse_form(headers: Headers, body: bytes) -> FormData:
    try:
        return await _InMemoryParser(headers, _pieces(body), max_files=MAX_FILES).parse()
    except MultiPartException as error:
        raise SluiceError(ErrorCode.INVALID, f"the form cannot be read: {error.message}") from None


async def _pieces(body: bytes) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(body), _PIECE_BYTES):
        await asyncio.sleep(0)
        yield body[start : start + _PIECE_BYTES]


def _check_form(files: Sequence[UploadFile], fields: Mapping[str, str]) -> None:
    if not files:
        raise invalid("file", "the form has no file; with curl: -F file=@handbook.pdf")
    for name in ("id", "title"):
        if len(files) > 1 and name in fields:
            raise invalid(name, f"{name} is for a form with one file, and this one has {len(files)}")


def _unknown_fields(fields: Mapping[str, str], is_strict: bool) -> list[str]:
    unknown = [name for name in fields if name not in _FORM_FIELDS]
    if unknown and is_strict:
        name = quote_name(unknown[0])
        raise invalid(name, f"unknown field {name}; this server refuses what it does not know")
    return unknown


def _path_in_folder(filename: str) -> str:
    """Return the path that a form's file has below the folder that it was sent from: without steps above it."""
    return "/".join(part for part in filename.split("/") if part not in ("", ".", ".."))


async def _read_file(
    file: UploadFile, fields: Mapping[str, str], metadata: Metadata
) -> list[Upload | UnreadableUpload]:
    """Read the file as one document, or as JSON lines."""
    document_id = fields.get("id", "") or _path_in_folder(file.filename or "")
    content_type, content = file.content_type or "", await file.read()
    if is_jsonl(content_type, file.filename or ""):
        return await run_aside(lambda: _read_lines(content))
    try:
        encoding = _encoding(content_type)
        format = await run_aside(lambda: detect_format(content_type, document_id, content, encoding))
    except SluiceError as error:
        return [UnreadableUpload(document_id, error)]
    return [Upload(document_id, content, format, fields.get("title", ""), metadata, encoding)]
