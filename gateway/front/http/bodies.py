"""JSON bodies of requests and responses, as routes that answer in one piece read and write them."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from pydantic import BaseModel

from sluice.gateway.front.http.parsing import read_body, warning_header
from sluice.gateway.front.long_work import LONG_ELEMENTS, PIECE_ELEMENTS, breathe, run_aside
from sluice.gateway.options.http import HttpOptions

RequestT = TypeVar("RequestT", bound=BaseModel)


async def read_fields(
    request: Request, schema: type[RequestT], options: HttpOptions
) -> tuple[RequestT, dict[str, str]]:
    """Read and parse the body. Returns its fields, and the headers that the response must carry."""
    fields, ignored = await read_body(request, schema, options)
    return fields, warning_header(ignored)


def json_response(payload: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(payload), status, headers, "application/json")


async def dump_list(
    head: Mapping[str, Any], name: str, items: Iterable[Any], num_items: int, num_elements: int
) -> bytes:
    """Return `head` with the list `name` as JSON, which is made in pieces aside where the items have many elements. An
    element is a number, or some 16 characters."""
    per_piece = max(1, PIECE_ELEMENTS * num_items // max(1, num_elements))

    def write() -> bytes:
        pieces, rest = [], iter(items)
        while piece := list(islice(rest, per_piece)):
            pieces.append(orjson.dumps(piece, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1])
            if num_items > per_piece:
                breathe()
        return orjson.dumps(head)[:-1] + b',"%s":[' % name.encode() + b",".join(pieces) + b"]}"

    return write() if num_elements <= LONG_ELEMENTS else await run_aside(write)
