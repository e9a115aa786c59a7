"""Puts the documents of one request into a collection, each on its own account."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import orjson
from fastapi import Response

from gateway.http.errors import HTTP_STATUS, as_sluice_error, openai_error_body
from gateway.http.rag.exchange import json_response
from gateway.http.rag.json_uploads import Unreadable
from gateway.http.rag.objects import JsonObject, document_object, list_object
from pipelines.rag import owner_keys
from pipelines.rag.library import DocumentLibrary, PutResult
from pipelines.rag.upload import Upload
from sluice.errors import ErrorCode, SluiceError

_NOT_THE_DOCUMENT_S = {ErrorCode.FORBIDDEN, ErrorCode.NOT_FOUND, ErrorCode.OVERLOADED, ErrorCode.UNAVAILABLE}
"""What the next document would meet as well: store, encoder or key."""
_OF_THE_COLLECTION = ("collection", owner_keys.PARAMETER)


@dataclass(frozen=True, slots=True)
class Batch:
    """Where the documents of a request go."""

    library: DocumentLibrary
    collection: str
    key: str
    force: bool
    request_id: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one document."""

    id: str
    result: PutResult | SluiceError

    def as_object(self) -> JsonObject:
        if isinstance(self.result, SluiceError):
            return {"id": self.id, "object": "document", "status": "failed", **_error(self.result)}
        return {**document_object(self.result.info), "status": self.result.status.value}


async def put_all(batch: Batch, uploads: Iterable[Upload | Unreadable]) -> list[Outcome]:
    """What became of each, in their order; as many at a time as the library reads.

    Raises what is no document's fault: it ends the request, and what was put by then stays.
    """
    outcomes: dict[int, Outcome] = {}
    waiting = enumerate(uploads)

    async def work() -> None:
        for index, upload in waiting:
            outcomes[index] = Outcome(upload.id, await _put(batch, upload))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(batch.library.settings.num_parallel_puts):
                group.create_task(work())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [outcomes[index] for index in sorted(outcomes)]


async def _put(batch: Batch, upload: Upload | Unreadable) -> PutResult | SluiceError:
    if isinstance(upload, Unreadable):
        await asyncio.sleep(0)  # thousands of these would hold the event loop
        return upload.error
    try:
        return await batch.library.put(batch.collection, upload, batch.key, force=batch.force)
    except Exception as failure:
        error = as_sluice_error(failure, batch.request_id)
        if error.code in _NOT_THE_DOCUMENT_S or error.param in _OF_THE_COLLECTION:
            raise error from None
        return error


def answer_of(outcomes: list[Outcome], headers: Mapping[str, str]) -> Response:
    """200 where one was taken at least; else the error of the first, beside what became of each.

    Raises INVALID where there are none.
    """
    if not outcomes:
        raise SluiceError(ErrorCode.INVALID, "there is no document in the request's body")
    told = list_object([outcome.as_object() for outcome in outcomes])
    first = outcomes[0]
    if not isinstance(first.result, SluiceError) or not _all_failed(outcomes):
        return json_response(told, 200, headers)
    error = first.result
    if len(outcomes) > 1:
        message = f"none of {len(outcomes)} documents was taken; the first, {first.id[:80]!r}: {error.message}"
        error = SluiceError(error.code, message, param=error.param)
    return json_response({**_error(error), **told}, HTTP_STATUS[error.code], headers)


def _all_failed(outcomes: list[Outcome]) -> bool:
    return all(isinstance(outcome.result, SluiceError) for outcome in outcomes)


def _error(error: SluiceError) -> JsonObject:
    """As the body of a failed request has it."""
    body: JsonObject = orjson.loads(openai_error_body(error))
    return body
