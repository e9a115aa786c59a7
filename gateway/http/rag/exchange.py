"""What all RAG routes share of requests and answers."""

from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from pydantic import BaseModel

from gateway.http.parsing import parse_body, warning_header
from gateway.http.request import read_body
from gateway.options.http import HttpOptions
from pipelines.rag import keys

RequestT = TypeVar("RequestT", bound=BaseModel)


def collection_key(request: Request) -> str:
    """The owner's key that came with the request; "" for none."""
    return request.headers.get(keys.HEADER, "")


async def parsed_body(
    request: Request, schema: type[RequestT], options: HttpOptions
) -> tuple[RequestT, dict[str, str]]:
    """The request's fields, and the headers that its answer must carry. Raises what reading and parsing raise."""
    body = await read_body(request, options.max_input_bytes)
    fields, ignored = parse_body(schema, body, options.is_strict)
    return fields, warning_header(ignored)


def json_response(payload: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(payload), status, headers, "application/json")
