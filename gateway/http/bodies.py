"""JSON bodies of requests and responses, as routes that answer in one piece read and write them."""

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from pydantic import BaseModel

from gateway.http.parsing import parse_pieces_of_body, warning_header
from gateway.http.request import read_pieces
from gateway.options.http import HttpOptions

RequestT = TypeVar("RequestT", bound=BaseModel)


async def read_fields(
    request: Request, schema: type[RequestT], options: HttpOptions
) -> tuple[RequestT, dict[str, str]]:
    """Read and parse the body. Returns its fields, and the headers that the response must carry."""
    async with aclosing(read_pieces(request, options.max_input_bytes)) as pieces:
        fields, ignored = await parse_pieces_of_body(schema, pieces, options.is_strict)
    return fields, warning_header(ignored)


def json_response(payload: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(payload), status, headers, "application/json")
