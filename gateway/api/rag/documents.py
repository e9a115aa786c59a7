"""The handlers of `/v1/rag/{collection}/documents`, and how the documents of one request are put."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import orjson
from fastapi import Query, Request, Response

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.rag.bodies import JsonObject, collection_key, format_document, format_list
from sluice.gateway.api.rag.uploads import UnreadableUpload, read_upload, read_uploads
from sluice.gateway.front.http.bodies import json_response
from sluice.gateway.front.http.errors import HTTP_STATUS, as_sluice_error, openai_error_body
from sluice.gateway.front.http.parsing import warning_header
from sluice.gateway.front.http.request import get_request_id, run_while_connected
from sluice.gateway.options.http import HttpOptions
from sluice.pipelines.rag.library import DocumentLibrary, PutResult, PutStatus, check_collection_name
from sluice.pipelines.rag.types import Upload
from sluice.pipelines.text.types import OWNER_KEY

MAX_LISTED = 1000
Limit = Annotated[int, Query(ge=1, le=MAX_LISTED, description="Most documents to list.")]
After = Annotated[str, Query(description="List documents whose ids come after this one.")]
Force = Annotated[bool, Query(description="Chunk and encode unchanged documents, too.")]
WithText = Annotated[bool, Query(alias="text", description="Whether to include the parsed text.")]
_REQUEST_ERRORS = {ErrorCode.FORBIDDEN, ErrorCode.NOT_FOUND, ErrorCode.OVERLOADED, ErrorCode.UNAVAILABLE}
"""Errors of store, encoder or key, which the next document would meet as well."""
_COLLECTION_PARAMS = ("collection", OWNER_KEY)


class DocumentRoutes:
    """The handlers of documents over one library."""

    def __init__(self, library: DocumentLibrary, options: HttpOptions) -> None:
        self._library = library
        self._options = options

    async def add(self, request: Request, collection: str, force: Force = False) -> Response:
        """Add documents, or replace those of their ids. A missing collection is created.

        Each document has a status of its own: created, updated, unchanged or failed, with its error. The response is
        200 if at least one was accepted, else the error of the first. A disconnect stops what has not begun.
        """
        check_collection_name(collection)
        uploads, ignored = await read_uploads(request, self._options)
        batch = UploadBatch(self._library, collection, collection_key(request), force, get_request_id(request))
        outcomes = await run_while_connected(request.receive, put_all(batch, uploads))
        return build_response(outcomes, warning_header(ignored))

    async def put(self, request: Request, collection: str, document_id: str, force: Force = False) -> Response:
        """Put one document, replacing any of its id. The response is 201 if there was none."""
        check_collection_name(collection)
        upload = await read_upload(request, self._options, document_id)
        put = self._library.put(collection, upload, collection_key(request), force=force)
        result = await run_while_connected(request.receive, put)
        status = 201 if result.status is PutStatus.CREATED else 200
        return json_response({**format_document(result.info), "status": result.status.value}, status)

    async def list_all(self, request: Request, collection: str, limit: Limit = 100, after: After = "") -> Response:
        """List a collection's documents by id, without their texts. The next page starts after the last id listed."""
        found = await self._library.documents(collection, after, limit + 1, collection_key(request))
        page = [format_document(info) for info in found[:limit]]
        return json_response(format_list(page, has_more=len(found) > limit))

    async def get(self, request: Request, collection: str, document_id: str, with_text: WithText = True) -> Response:
        """Get one document with its parsed text, in which the offsets of sources count."""
        found = await self._library.document(collection, document_id, collection_key(request))
        text = {"text": found.text} if with_text else {}
        return json_response({**format_document(found.info), **text})

    async def delete(self, request: Request, collection: str, document_id: str) -> Response:
        """Delete a document. Later answers do not use it."""
        if not await self._library.delete_document(collection, document_id, collection_key(request)):
            message = f"collection '{collection}' has no document {document_id[:200]!r}"
            raise SluiceError(ErrorCode.NOT_FOUND, message, param="document")
        return json_response({"id": document_id, "object": "document", "deleted": True})


@dataclass(frozen=True, slots=True)
class UploadBatch:
    """The destination of a request's documents."""

    library: DocumentLibrary
    collection: str
    key: str
    force: bool
    request_id: str


@dataclass(frozen=True, slots=True)
class UploadOutcome:
    """The result for one document."""

    id: str
    result: PutResult | SluiceError

    def as_object(self) -> JsonObject:
        if isinstance(self.result, SluiceError):
            return {"id": self.id, "object": "document", "status": "failed", **_format_error(self.result)}
        return {**format_document(self.result.info), "status": self.result.status.value}


async def put_all(batch: UploadBatch, uploads: Iterable[Upload | UnreadableUpload]) -> list[UploadOutcome]:
    """Put all documents, as many at a time as the library processes. Returns the outcomes in the documents' order.

    Raises an error that is not due to one document: it ends the request, and documents put by then stay.
    """
    outcomes: dict[int, UploadOutcome] = {}
    waiting = enumerate(uploads)

    async def work() -> None:
        for index, upload in waiting:
            outcomes[index] = UploadOutcome(upload.id, await _put(batch, upload))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(batch.library.settings.num_parallel_puts):
                group.create_task(work())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [outcomes[index] for index in sorted(outcomes)]


async def _put(batch: UploadBatch, upload: Upload | UnreadableUpload) -> PutResult | SluiceError:
    if isinstance(upload, UnreadableUpload):
        await asyncio.sleep(0)  # thousands of these would block the event loop
        return upload.error
    try:
        return await batch.library.put(batch.collection, upload, batch.key, force=batch.force)
    except Exception as failure:
        error = as_sluice_error(failure, batch.request_id)
        if error.code in _REQUEST_ERRORS or error.param in _COLLECTION_PARAMS:
            raise error from None
        return error


def build_response(outcomes: list[UploadOutcome], headers: Mapping[str, str]) -> Response:
    """Build a 200 response if at least one document was accepted, else the first one's error, with all outcomes.

    Raises INVALID if there are no documents.
    """
    if not outcomes:
        raise SluiceError(ErrorCode.INVALID, "there is no document in the request's body")
    payload = format_list([outcome.as_object() for outcome in outcomes])
    first = outcomes[0]
    error = first.result
    if not isinstance(error, SluiceError) or not all(isinstance(each.result, SluiceError) for each in outcomes):
        return json_response(payload, 200, headers)
    if len(outcomes) > 1:
        message = f"none of {len(outcomes)} documents was taken; the first, {first.id[:80]!r}: {error.message}"
        error = SluiceError(error.code, message, param=error.param)
    return json_response({**_format_error(error), **payload}, HTTP_STATUS[error.code], headers)


def _format_error(error: SluiceError) -> JsonObject:
    body: JsonObject = orjson.loads(openai_error_body(error))
    return body
