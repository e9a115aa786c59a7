"""`/v1/messages/batches`: Anthropic's batches, which are those of `/v1/batches` whose requests ask for messages."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field, StringConstraints

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.answers.batches.lines import read_raw_lines
from sluice.gateway.answers.batches.records import BATCH_PURPOSE, UNFINISHED, Batch, BatchStatus
from sluice.gateway.answers.batches.service import BatchService
from sluice.gateway.answers.batches.store import Page
from sluice.gateway.api.anthropic.models import MAX_PAGE, list_page, timestamp
from sluice.gateway.calls import current_identity
from sluice.gateway.front.http.bodies import json_response, read_fields
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.parsing import RequestObject, quote_value
from sluice.gateway.front.http.request import owner_of, parse_scheduling
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.tenancy.access.control import TENANT_HEADER

ENDPOINT = "/v1/messages"
_WINDOW, _WINDOW_S = "24h", 86_400
_MAX_REQUESTS = 100_000
_LINES_PER_PIECE = 256
_FILENAME = "message_batch.jsonl"


class BatchItem(RequestObject):
    """One request of a batch: the body of `POST /v1/messages`, and the name by which its result is found."""

    custom_id: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    params: dict[str, Any] = Field(description="The body of POST /v1/messages, without stream.")


class CreateMessageBatch(RequestObject):
    """`POST /v1/messages/batches`."""

    example = (
        '{"requests": [{"custom_id": "a", "params": {"model": "rill", "max_tokens": 50, '
        '"messages": [{"role": "user", "content": "Hello!"}]}}]}'
    )
    requests: list[BatchItem] = Field(min_length=1, max_length=_MAX_REQUESTS, fail_fast=True)


def router(batches: BatchService, config: ServeConfig) -> APIRouter:
    """Return the routes under /v1/messages/batches."""
    routes = MessageBatchRoutes(batches, config)
    api = APIRouter(prefix=f"{ENDPOINT}/batches", tags=["Anthropic"], default_response_class=Response)
    api.post("", openapi_extra=describe_body(CreateMessageBatch, (TENANT_HEADER,)))(routes.create)
    api.get("")(routes.list)
    api.get("/{batch_id}")(routes.retrieve)
    api.post("/{batch_id}/cancel")(routes.cancel)
    api.delete("/{batch_id}")(routes.delete)
    api.get("/{batch_id}/results")(routes.results)
    return api


class MessageBatchRoutes:
    """Handlers of the routes. An owner sees its own batches alone."""

    def __init__(self, batches: BatchService, config: ServeConfig) -> None:
        self._batches = batches
        self._store = batches.store
        self._config = config

    async def create(self, request: Request) -> Response:
        """Create a batch."""
        owner = owner_of(request.headers)
        fields, headers = await read_fields(request, CreateMessageBatch, self._config.http)
        for model in _check_items(fields.requests):
            self._batches.check_model(ENDPOINT, model)
        async with self._store.new_upload() as upload:
            for number, item in enumerate(fields.requests, 1):
                await upload.write(_line(item))
                if number % _LINES_PER_PIECE == 0:
                    await asyncio.sleep(0)
            file = await self._batches.add_file(upload, owner, BATCH_PURPOSE, _FILENAME, None)
        tenant = parse_scheduling(request.headers, self._config.requests).tenant
        batch = await self._batches.create(
            owner,
            tenant,
            current_identity(),
            file.id,
            ENDPOINT,
            _WINDOW,
            _WINDOW_S,
            None,
            None,
            num_requests=len(fields.requests),
        )
        return json_response(await self._body(batch, request), headers=headers)

    async def list(
        self,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
        after_id: str = "",
        before_id: str = "",
    ) -> Response:
        """List batches, the newest first."""
        page = Page(limit, before_id or after_id, is_ascending=bool(before_id))
        found = await self._store.batches(owner_of(request.headers), page, ENDPOINT)
        bodies = [await self._body(each, request) for each in found[:limit]]
        has_more = len(found) > limit
        return json_response(list_page(bodies[::-1] if before_id else bodies, has_more=has_more))

    async def retrieve(self, request: Request, batch_id: str) -> Response:
        """Describe a batch."""
        return json_response(await self._body(await self._find(request, batch_id), request))

    async def cancel(self, request: Request, batch_id: str) -> Response:
        """End a batch early. What is finished keeps its results. One that has ended stays as it is."""
        batch = await self._find(request, batch_id)
        if batch.status in UNFINISHED and batch.status is not BatchStatus.FINALIZING:
            batch = await self._batches.cancel(batch.owner, batch_id)
        return json_response(await self._body(batch, request))

    async def delete(self, request: Request, batch_id: str) -> Response:
        """Delete a batch that has ended, with its results."""
        await self._find(request, batch_id)
        await self._store.delete_batch(owner_of(request.headers), batch_id)
        return json_response({"id": batch_id, "type": "message_batch_deleted"})

    async def results(self, request: Request, batch_id: str) -> Response:
        """Return the results of a batch that has ended, a JSON object a line, in no order."""
        batch = await self._find(request, batch_id)
        if batch.status in UNFINISHED:
            raise invalid("batch_id", f"batch {batch_id} has no results before it has ended, and it is {batch.status}")
        return StreamingResponse(_in_pieces(self._results(batch)), media_type="application/x-jsonl")

    async def _find(self, request: Request, batch_id: str) -> Batch:
        batch = await self._store.batch(owner_of(request.headers), batch_id)
        if batch.endpoint != ENDPOINT:
            raise SluiceError(ErrorCode.NOT_FOUND, f"No batch found with id {batch_id[:80]!r}", param="batch_id")
        return batch

    async def _body(self, batch: Batch, request: Request) -> dict[str, Any]:
        """Return a batch in Anthropic's words."""
        has_ended = batch.status not in UNFINISHED
        is_cancelling = batch.status is BatchStatus.CANCELLING
        return {
            "id": batch.id,
            "type": "message_batch",
            "processing_status": "ended" if has_ended else "canceling" if is_cancelling else "in_progress",
            "request_counts": await self._counts(batch),
            "created_at": timestamp(batch.created_at),
            "expires_at": timestamp(batch.expires_at),
            "ended_at": timestamp(batch.times[batch.status]) if has_ended else None,
            "cancel_initiated_at": _optional(batch.times.get(BatchStatus.CANCELLING)),
            "archived_at": None,
            "results_url": f"{request.base_url}v1/messages/batches/{batch.id}/results" if has_ended else None,
        }

    async def _counts(self, batch: Batch) -> dict[str, int]:
        """Return how many requests ended in which way; until the batch ends, all count as processed."""
        counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
        if batch.status in UNFINISHED:
            return counts | {"processing": batch.num_requests}
        errors = self._store.path(batch.errors_id)
        num_expired = await asyncio.to_thread(_count_expired, errors) if batch.is_expired and batch.has_errors else 0
        counts |= {"succeeded": batch.counts.completed, "expired": num_expired}
        counts["errored"] = batch.counts.failed - num_expired
        rest = "errored" if batch.status is BatchStatus.FAILED else "canceled"
        counts[rest] += batch.num_requests - batch.counts.total
        return counts

    def _results(self, batch: Batch) -> Iterator[bytes]:
        """Yield the line of each result. For threads."""
        finished = set()
        for is_there, file_id in ((batch.has_output, batch.output_id), (batch.has_errors, batch.errors_id)):
            for raw in _lines(self._store.path(file_id)) if is_there else ():
                line = _decode_result(raw)
                finished.add(line.custom_id)
                yield _result(line.custom_id, line.result())
        if len(finished) == batch.num_requests:
            return
        problem = batch.problems[0].message if batch.problems else "the batch could not be worked on"
        rest = (
            _errored("invalid_request_error", problem) if batch.status is BatchStatus.FAILED else {"type": "canceled"}
        )
        for raw in _lines(self._store.path(batch.input_file_id)):
            custom_id = _decode_request(raw).custom_id
            if custom_id not in finished:
                yield _result(custom_id, rest)


def _check_items(items: list[BatchItem]) -> set[str]:
    """Return the models of the requests. Raises INVALID for a request that no batch can have."""
    places: dict[str, int] = {}
    models = set()
    for index, item in enumerate(items):
        path = f"requests[{index}]"
        if (first := places.setdefault(item.custom_id, index)) != index:
            raise invalid(f"{path}.custom_id", f"{path}.custom_id is that of requests[{first}]; custom ids must differ")
        model = item.params.get("model")
        if not isinstance(model, str):
            what = "is required" if model is None else f"must be a string, got {quote_value(model)}"
            raise invalid(f"{path}.params.model", f"{path}.params.model {what}")
        if item.params.get("stream"):
            raise invalid(
                f"{path}.params.stream", f"{path}.params.stream must be false: the answers of a batch are whole"
            )
        models.add(model)
    return models


def _line(item: BatchItem) -> bytes:
    try:
        line = {"custom_id": item.custom_id, "method": "POST", "url": ENDPOINT, "body": item.params}
        return orjson.dumps(line) + b"\n"
    except TypeError as error:
        raise invalid("requests", f"params of {item.custom_id!r} cannot be kept: {error}") from None


def _optional(time_s: int | None) -> str | None:
    return None if time_s is None else timestamp(time_s)


class _Request(msgspec.Struct):
    custom_id: str


class _Answer(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Result(msgspec.Struct):
    custom_id: str
    response: _Answer | None = None

    def result(self) -> dict[str, Any]:
        """Return the result in Anthropic's words."""
        if self.response is None:
            return {"type": "expired"}  # the only results without a response
        if self.response.status_code < 300:
            return {"type": "succeeded", "message": self.response.body}
        return {"type": "errored", "error": self.response.body}


_decode_request = msgspec.json.Decoder(_Request).decode
_decode_result = msgspec.json.Decoder(_Result).decode


def _errored(kind: str, message: str) -> dict[str, Any]:
    return {"type": "errored", "error": {"type": "error", "error": {"type": kind, "message": message}}}


def _result(custom_id: str, result: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"custom_id": custom_id, "result": result}) + b"\n"


def _count_expired(path: Path) -> int:
    return sum(_decode_result(raw).response is None for raw in _lines(path))


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file; none of one that was deleted, as the owner may at /v1/files."""
    with suppress(FileNotFoundError):
        for _, raw in read_raw_lines(path):
            yield raw


async def _in_pieces(lines: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield lines that a thread makes, many at a time."""
    while piece := await asyncio.to_thread(lambda: b"".join(islice(lines, _LINES_PER_PIECE))):
        yield piece
