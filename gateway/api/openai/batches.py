"""`/v1/batches`: many requests in one file, answered when there is room for them."""

import re
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, StringConstraints, field_validator

from sluice.gateway.answers.batches.lines import ENDPOINTS
from sluice.gateway.answers.batches.service import BatchService
from sluice.gateway.answers.batches.store import Page
from sluice.gateway.api.openai import files
from sluice.gateway.calls import current_identity
from sluice.gateway.front.http.bodies import json_response, read_fields
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.parsing import RequestObject
from sluice.gateway.front.http.request import owner_of, parse_scheduling
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.tenancy.access.control import TENANT_HEADER

_WINDOW = re.compile(r"([1-9]\d{0,6})([smhd])", re.ASCII)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MAX_WINDOW_S = 30 * 86_400
MAX_METADATA = 16


class OutputExpiry(RequestObject):
    """When the files of the results expire."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=files.EXPIRY_S[0], le=files.EXPIRY_S[-1])


class BatchRequest(RequestObject):
    """`POST /v1/batches`."""

    example = '{"input_file_id": "file-abc", "endpoint": "/v1/chat/completions", "completion_window": "24h"}'
    input_file_id: str = Field(max_length=80, description="A file whose purpose is batch: a request a line.")
    endpoint: str = Field(max_length=80, description=f"The url of every line: {', '.join(ENDPOINTS)}.")
    completion_window: str = Field(
        max_length=16, description="Time for all requests, such as 24h: a number and s, m, h or d; at most 30d."
    )
    metadata: (
        dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]] | None
    ) = Field(None, max_length=MAX_METADATA)
    output_expires_after: OutputExpiry | None = None

    @field_validator("completion_window")
    @classmethod
    def _check_window(cls, text: str) -> str:
        if not 0 < window_s(text) <= MAX_WINDOW_S:
            raise ValueError("a number and s, m, h or d, such as 24h, and at most 30d")
        return text


def window_s(text: str) -> int:
    """Return the seconds of a completion window; 0 for what is none."""
    match = _WINDOW.fullmatch(text)
    return int(match[1]) * _UNITS_S[match[2]] if match is not None else 0


def router(batches: BatchService, config: ServeConfig) -> APIRouter:
    """Return the routes of batches and of files."""
    api = APIRouter(prefix="/v1", tags=["OpenAI"], default_response_class=Response)
    routes = BatchRoutes(batches, config)
    api.post("/batches", openapi_extra=describe_body(BatchRequest, (TENANT_HEADER,)))(routes.create)
    api.get("/batches")(routes.list)
    api.get("/batches/{batch_id}")(routes.retrieve)
    api.post("/batches/{batch_id}/cancel")(routes.cancel)
    files.add_routes(api, batches, config)
    return api


class BatchRoutes:
    """Handlers of the routes. An owner sees its own batches alone."""

    def __init__(self, batches: BatchService, config: ServeConfig) -> None:
        self._batches = batches
        self._config = config

    async def create(self, request: Request) -> Response:
        """Create a batch."""
        owner = owner_of(request.headers)
        fields, headers = await read_fields(request, BatchRequest, self._config.http)
        expiry = fields.output_expires_after
        batch = await self._batches.create(
            owner,
            parse_scheduling(request.headers, self._config.requests).tenant,
            current_identity(),
            fields.input_file_id,
            fields.endpoint,
            fields.completion_window,
            window_s(fields.completion_window),
            fields.metadata,
            None if expiry is None else expiry.seconds,
        )
        return json_response(batch.json(), headers=headers)

    async def list(
        self, request: Request, after: files.After = "", limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> Response:
        """List batches, the newest first."""
        owner = owner_of(request.headers)
        return await files.list_response(await self._batches.store.batches(owner, Page(limit, after)), limit)

    async def retrieve(self, request: Request, batch_id: str) -> Response:
        """Describe a batch: its state, its counts, and when it will be done."""
        owner = owner_of(request.headers)
        return json_response((await self._batches.store.batch(owner, batch_id)).json())

    async def cancel(self, request: Request, batch_id: str) -> Response:
        """End a batch early. What is finished keeps its results."""
        return json_response((await self._batches.cancel(owner_of(request.headers), batch_id)).json())
