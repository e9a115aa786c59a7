"""From a request's body to documents: JSON, JSON lines, forms with files, or one document as it is."""

import asyncio
from collections.abc import Iterable
from email.message import Message

from fastapi import Request

from gateway.http.parsing import quote_name
from gateway.http.rag.form_uploads import form_uploads
from gateway.http.rag.json_uploads import Unreadable, json_uploads, line_uploads, read_metadata
from gateway.http.request import read_body
from gateway.options.http import HttpOptions
from pipelines.rag.documents.jsonl import is_jsonl
from pipelines.rag.documents.parse import format_of
from pipelines.rag.upload import Upload
from sluice.errors import invalid

JSON = "application/json"
FORM = "multipart/form-data"
_SAYS_NOTHING = ("application/octet-stream", "application/x-www-form-urlencoded")
"""What clients send for whatever it is: the latter is what curl's --data-binary says."""
_CHARSETS = ("utf-8", "utf8", "us-ascii")


async def read_upload(request: Request, options: HttpOptions, document_id: str) -> Upload:
    """The one document that is the body. Its format is what the content type or else the id's ending says."""
    kind = _media_type(request)
    if kind in (JSON, FORM) or is_jsonl(kind, ""):
        takes = "POST to the collection's documents takes JSON, JSON lines and forms"
        raise invalid("content-type", f"the body must be the document itself, got {kind}; {takes}")
    query = request.query_params
    metadata = read_metadata(query.get("metadata", ""))
    content = await read_body(request, options.max_input_bytes)
    format = format_of("" if kind in _SAYS_NOTHING else kind, document_id, content)
    return Upload(document_id, content, format, query.get("title", ""), metadata)


async def read_uploads(request: Request, options: HttpOptions) -> tuple[Iterable[Upload | Unreadable], list[str]]:
    """The documents in the body, and the names of its fields that nobody knows.

    Raises INVALID for a body that cannot be read at all; a document in it that cannot is Unreadable.
    """
    kind = _media_type(request)
    if kind == FORM:
        body = await read_body(request, options.max_input_bytes)
        return await form_uploads(request.headers, body, options.is_strict)
    if kind == JSON:
        body = await read_body(request, options.max_input_bytes)
        return await asyncio.to_thread(json_uploads, body, options.is_strict)  # long where they are many
    if is_jsonl(kind, ""):
        return line_uploads(await read_body(request, options.max_input_bytes)), []
    document_id = request.query_params.get("id", "")
    if not document_id:
        what = f"a body of type {quote_name(kind)}" if kind else "a body without content type"
        raise invalid("id", f"id is required: {what} is one document, which ?id=NAME names")
    return [await read_upload(request, options, document_id)], []


def _media_type(request: Request) -> str:
    """Without its parameters, in lower case. Raises INVALID for a charset other than UTF-8."""
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    charset = header.get_content_charset("utf-8")
    if charset not in _CHARSETS:
        raise invalid("content-type", f"documents must be UTF-8, got charset {quote_name(charset)}")
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()
