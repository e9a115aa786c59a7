"""`/v1/rag/{collection}/documents`."""

from typing import Annotated

from fastapi import Query, Request, Response

from gateway.http.parsing import warning_header
from gateway.http.rag.exchange import collection_key, json_response
from gateway.http.rag.objects import document_object, list_object
from gateway.http.rag.putting import Batch, answer_of, put_all
from gateway.http.rag.uploads import read_upload, read_uploads
from gateway.http.request import get_request_id, run_while_connected
from gateway.options.http import HttpOptions
from pipelines.rag.library import Library, PutStatus, check_name
from sluice.errors import ErrorCode, SluiceError

MAX_LISTED = 1000
Limit = Annotated[int, Query(ge=1, le=MAX_LISTED, description="How many at most.")]
After = Annotated[str, Query(description="Those whose ids come after this one.")]
Force = Annotated[bool, Query(description="Cut and encode anew what has not changed, too.")]
WithText = Annotated[bool, Query(alias="text", description="Whether the parsed text comes along.")]


class DocumentRoutes:
    """The handlers of documents over one library."""

    def __init__(self, library: Library, options: HttpOptions) -> None:
        self._library = library
        self._options = options

    async def add(self, request: Request, collection: str, force: Force = False) -> Response:
        """Add documents, or replace those of their ids. A missing collection is made.

        Each document has a status of its own: created, updated, unchanged or failed, with its error. The answer is 200
        where at least one was taken, else the error of the first. A client that leaves stops what has not begun.
        """
        check_name(collection)
        uploads, ignored = await read_uploads(request, self._options)
        batch = Batch(self._library, collection, collection_key(request), force, get_request_id(request))
        outcomes = await run_while_connected(request.receive, put_all(batch, uploads))
        return answer_of(outcomes, warning_header(ignored))

    async def put(self, request: Request, collection: str, document_id: str, force: Force = False) -> Response:
        """Put one document, in the place of the one of its id. 201 where there was none."""
        check_name(collection)
        upload = await read_upload(request, self._options, document_id)
        put = self._library.put(collection, upload, collection_key(request), force=force)
        result = await run_while_connected(request.receive, put)
        status = 201 if result.status is PutStatus.CREATED else 200
        return json_response({**document_object(result.info), "status": result.status.value}, status)

    async def list_all(self, request: Request, collection: str, limit: Limit = 100, after: After = "") -> Response:
        """A collection's documents by id, without their texts. The next page comes after the last id of this one."""
        found = await self._library.documents(collection, after, limit + 1, collection_key(request))
        page = [document_object(info) for info in found[:limit]]
        return json_response(list_object(page, has_more=len(found) > limit))

    async def get(self, request: Request, collection: str, document_id: str, with_text: WithText = True) -> Response:
        """One document with its text, as it was parsed: what the offsets of sources count in."""
        found = await self._library.document(collection, document_id, collection_key(request))
        text = {"text": found.text} if with_text else {}
        return json_response({**document_object(found.info), **text})

    async def delete(self, request: Request, collection: str, document_id: str) -> Response:
        """Delete a document. No answer rests on it from now on."""
        if not await self._library.delete_document(collection, document_id, collection_key(request)):
            message = f"collection '{collection}' has no document {document_id[:200]!r}"
            raise SluiceError(ErrorCode.NOT_FOUND, message, param="document")
        return json_response({"id": document_id, "object": "document", "deleted": True})
