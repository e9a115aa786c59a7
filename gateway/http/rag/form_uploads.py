"""Documents as the files of a form: `curl -F file=@handbook.pdf`."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence

from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from gateway.http.parsing import quote_name
from gateway.http.rag.json_uploads import Unreadable, check_count, line_uploads, read_metadata
from pipelines.rag.documents.jsonl import is_jsonl
from pipelines.rag.documents.parse import format_of
from pipelines.rag.types import Metadata
from pipelines.rag.upload import Upload
from sluice.errors import ErrorCode, SluiceError, invalid

MAX_FILES = 1000
_FIELDS = ("id", "title", "metadata")
_PIECE_BYTES = 64 << 10
"""Parsed at a time: the event loop has its turn between."""


class _InMemoryParser(MultiPartParser):
    """Needs no temporary files: the body that the parts come from is in memory already."""

    spool_max_size = sys.maxsize


async def form_uploads(headers: Headers, body: bytes, is_strict: bool) -> tuple[list[Upload | Unreadable], list[str]]:
    """A document for each file, whose name is its id, and the names of unknown fields. Raises INVALID.

    The fields: `metadata` is that of all files; `id` and `title` are for a form with one. Files of JSON lines say all
    that themselves.
    """
    form = await _parsed(headers, body)
    try:
        items = form.multi_items()
        files = [value for _, value in items if isinstance(value, UploadFile)]
        fields = {name: value for name, value in items if isinstance(value, str)}
        _check(files, fields)
        metadata = read_metadata(fields.get("metadata", ""))
        uploads: list[Upload | Unreadable] = []
        for file in files:
            uploads += await _uploads(file, fields, metadata)
            check_count(len(uploads))
        return uploads, _unknown(fields, is_strict)
    finally:
        await form.close()


async def _parsed(headers: Headers, body: bytes) -> FormData:
    try:
        return await _InMemoryParser(headers, _pieces(body), max_files=MAX_FILES).parse()
    except MultiPartException as error:
        raise SluiceError(ErrorCode.INVALID, f"the form cannot be read: {error.message}") from None


async def _pieces(body: bytes) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(body), _PIECE_BYTES):
        await asyncio.sleep(0)
        yield body[start : start + _PIECE_BYTES]


def _check(files: Sequence[UploadFile], fields: Mapping[str, str]) -> None:
    if not files:
        raise invalid("file", "the form has no file; with curl: -F file=@handbook.pdf")
    for name in ("id", "title"):
        if len(files) > 1 and name in fields:
            raise invalid(name, f"{name} is for a form with one file, and this one has {len(files)}")


def _unknown(fields: Mapping[str, str], is_strict: bool) -> list[str]:
    unknown = [name for name in fields if name not in _FIELDS]
    if unknown and is_strict:
        name = quote_name(unknown[0])
        raise invalid(name, f"unknown field {name}; this server refuses what it does not know")
    return unknown


async def _uploads(file: UploadFile, fields: Mapping[str, str], metadata: Metadata) -> list[Upload | Unreadable]:
    """The file as a document, or the documents that are its lines."""
    document_id = fields.get("id", "") or file.filename or ""
    content_type, content = file.content_type or "", await file.read()
    if is_jsonl(content_type, file.filename or ""):
        return list(line_uploads(content))
    try:
        format = format_of(content_type, document_id, content)
    except SluiceError as error:
        return [Unreadable(document_id, error)]
    return [Upload(document_id, content, format, fields.get("title", ""), metadata)]
