"""`/v1/files`: files that clients upload, and the results of their batches."""

import re
from collections import defaultdict
from collections.abc import AsyncIterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.responses import FileResponse

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.answers.batches.records import OUTPUT_PURPOSE, PURPOSES, Batch, FileRecord, base_name
from sluice.gateway.answers.batches.service import BatchService
from sluice.gateway.answers.batches.store import FileUpload, Page
from sluice.gateway.front.http.bodies import dump_list, json_response
from sluice.gateway.front.http.parsing import quote_name, warning_header
from sluice.gateway.front.http.request import owner_of, read_pieces
from sluice.gateway.options.config import ServeConfig

FORM_BYTES = 64 << 10
"""Bytes that a form may have beside its file."""
_MAX_FIELDS = 32
_MAX_BOUNDARY_BYTES = 70
"""The longest boundary of RFC 2046."""
EXPIRY_S = range(3600, 2_592_000 + 1)
"""Seconds after which a file may expire: an hour to 30 days, as at OpenAI."""
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(PURPOSES)},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": EXPIRY_S[0], "maximum": EXPIRY_S[-1]},
                    },
                }
            }
        },
    }
}
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_ENTRY_ELEMENTS = 32
"""Elements of a file or a batch in a list, as `dump_list` counts them."""
After = Annotated[str, Query(max_length=80)]


def add_routes(api: APIRouter, batches: BatchService, config: ServeConfig) -> None:
    """Add the routes to `api`, which has the prefix."""
    routes = FileRoutes(batches, config)
    api.post("/files", openapi_extra=_FORM)(routes.upload)
    api.get("/files")(routes.list)
    api.get("/files/{file_id}")(routes.retrieve)
    api.get("/files/{file_id}/content")(routes.content)
    api.delete("/files/{file_id}")(routes.delete)


@dataclass(slots=True)
class FileForm:
    """The fields of a form, and what is known of its file; `filename` None: it had none."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


class FileRoutes:
    """Handlers of the routes. An owner sees its own files alone."""

    def __init__(self, batches: BatchService, config: ServeConfig) -> None:
        self._batches = batches
        self._store = batches.store
        self._config = config

    async def upload(self, request: Request) -> Response:
        """Store a file."""
        owner = owner_of(request.headers)
        limit = self._config.batches.max_file_bytes + FORM_BYTES
        async with self._store.new_upload() as upload, aclosing(read_pieces(request, limit)) as pieces:
            form = await FormReader(request.headers.get("content-type", ""), upload).read(pieces)
            return await self._keep(form, upload, owner)

    async def _keep(self, form: FileForm, upload: FileUpload, owner: str) -> Response:
        if form.filename is None:
            raise invalid("file", "file is required; with curl: -F file=@requests.jsonl -F purpose=batch")
        purpose = form.fields.get("purpose")
        if purpose not in PURPOSES:
            got = "nothing" if purpose is None else f"{purpose[:80]!r}"
            raise invalid("purpose", f"purpose must be one of {', '.join(PURPOSES)}, got {got}")
        unknown = [quote_name(name) for name in form.fields if name not in _FIELDS]
        if unknown and self._config.http.is_strict:
            raise invalid(unknown[0], f"unknown field {unknown[0]}; this server refuses what it does not know")
        filename = base_name(form.filename)
        record = await self._batches.add_file(upload, owner, purpose, filename, _lifetime_s(form.fields))
        return json_response(record.json(), headers=warning_header(unknown))

    async def list(
        self,
        request: Request,
        after: After = "",
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: Annotated[str, Query(max_length=80)] = "",
    ) -> Response:
        """List files, the newest first."""
        page = Page(limit, after, order == "asc")
        return await list_response(await self._store.files(owner_of(request.headers), purpose, page), limit)

    async def retrieve(self, request: Request, file_id: str) -> Response:
        """Describe a file."""
        return json_response((await self._file(request, file_id)).json())

    async def content(self, request: Request, file_id: str) -> Response:
        """Return the contents of a file."""
        record = await self._file(request, file_id)
        media_type = "application/jsonl" if record.purpose == OUTPUT_PURPOSE else "application/octet-stream"
        headers = {"content-disposition": _disposition(base_name(record.filename))}
        return FileResponse(self._store.path(record.id), media_type=media_type, headers=headers)

    async def delete(self, request: Request, file_id: str) -> Response:
        """Delete a file. The input of a batch that is not over stays."""
        await self._store.delete_file(owner_of(request.headers), file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def _file(self, request: Request, file_id: str) -> FileRecord:
        return await self._store.file(owner_of(request.headers), file_id)


def _disposition(name: str) -> str:
    """Return the header of RFC 6266 for a file of this name, in ASCII also for clients that read nothing else."""
    plain = re.sub(r"[^ !#$&-[\]-~]", "_", name)
    encoded = "" if plain == name else f"; filename*=UTF-8''{quote(name, safe='')}"
    return f'attachment; filename="{plain}"{encoded}'


async def list_response(found: "list[FileRecord] | list[Batch]", limit: int) -> Response:
    """Return a page of `limit` of what was found, which may have one more."""
    page = found[:limit]
    ids = {"first_id": page[0].id, "last_id": page[-1].id} if page else {"first_id": None, "last_id": None}
    head = {"object": "list", **ids, "has_more": len(found) > limit}
    body = await dump_list(head, "data", (each.json() for each in page), len(page), len(page) * _ENTRY_ELEMENTS)
    return Response(body, media_type="application/json")


def _lifetime_s(fields: dict[str, str]) -> int | None:
    """Return the seconds of `expires_after`; None without it. Raises INVALID."""
    _, anchor_name, seconds_name = _FIELDS
    anchor, text = fields.get(anchor_name), fields.get(seconds_name)
    if anchor is None and text is None:
        return None
    if anchor != "created_at":
        raise invalid(anchor_name, f"{anchor_name} must be 'created_at', got {str(anchor)[:80]!r}")
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) not in EXPIRY_S:
        message = f"{seconds_name} must be a whole number from {EXPIRY_S[0]} to {EXPIRY_S[-1]}, got {str(text)[:80]!r}"
        raise invalid(seconds_name, message)
    return int(text)


class FormReader:
    """Reads one form. The parser calls back for each piece that it finds in the bytes it is fed."""

    def __init__(self, content_type: str, upload: FileUpload) -> None:
        """Raises INVALID for another content type."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 1 <= len(boundary) <= _MAX_BOUNDARY_BYTES:
            what = "multipart/form-data with the fields file and purpose"
            raise invalid("content-type", f"the body must be {what}, got {content_type[:80]!r}")
        self._form = FileForm()
        self._upload = upload
        self._headers: defaultdict[bytes, bytearray] = defaultdict(bytearray)
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._name = ""
        self._value = bytearray()
        self._num_value_bytes = 0
        self._is_file = False
        self._has_ended = False
        self._arrived: list[bytes] = []
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._on_header_name,
                "on_header_value": self._on_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._on_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    async def read(self, pieces: AsyncIterable[bytes]) -> FileForm:
        """Read the whole body. Raises INVALID for a form that cannot be read, and as `FileUpload.write`."""
        async for piece in pieces:
            try:
                self._parser.write(piece)
            except FormParserError as error:
                raise SluiceError(ErrorCode.INVALID, f"the form cannot be read: {error}") from None
            if self._arrived:
                arrived, self._arrived = self._arrived, []
                await self._upload.write(b"".join(arrived))
        if not self._has_ended:
            raise SluiceError(ErrorCode.INVALID, "the form cannot be read: it ends before its last boundary")
        return self._form

    def _begin_part(self) -> None:
        self._headers.clear()
        self._value.clear()

    def _on_header_name(self, piece: bytes, start: int, end: int) -> None:
        self._header_name += piece[start:end]

    def _on_header_value(self, piece: bytes, start: int, end: int) -> None:
        self._header_value += piece[start:end]

    def _end_header(self) -> None:
        self._headers[bytes(self._header_name).lower()] = self._header_value
        self._header_name, self._header_value = bytearray(), bytearray()

    def _end_headers(self) -> None:
        _, options = parse_options_header(bytes(self._headers[b"content-disposition"]))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = b"filename" in options or self._name == "file"
        if not self._is_file:
            return
        if self._name != "file" or self._form.filename is not None:
            raise invalid(
                "file", f"the form must have one file, in its field 'file', got another in {self._name!r:.80}"
            )
        self._form.filename = options.get(b"filename", b"").decode("utf-8", "replace") or "file"

    def _on_data(self, piece: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._arrived.append(piece[start:end])
            return
        self._num_value_bytes += end - start
        if self._num_value_bytes > FORM_BYTES:
            raise invalid(self._name, f"the fields of the form may have {FORM_BYTES} bytes beside its file")
        self._value += piece[start:end]

    def _end_part(self) -> None:
        if not self._is_file:
            if len(self._form.fields) == _MAX_FIELDS:
                raise SluiceError(ErrorCode.INVALID, f"the form may have {_MAX_FIELDS} fields")
            self._form.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._has_ended = True
