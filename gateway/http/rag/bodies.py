"""JSON bodies of requests and responses, as all RAG routes read and write them."""

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from pydantic import BaseModel

from gateway.http.parsing import parse_pieces_of_body, warning_header
from gateway.http.request import read_pieces
from gateway.options.http import HttpOptions
from pipelines.rag import owner_keys
from pipelines.rag.types import CollectionInfo, DocumentInfo

RequestT = TypeVar("RequestT", bound=BaseModel)
JsonObject = dict[str, Any]


def collection_key(request: Request) -> str:
    """Return the owner key of the request, "" for none."""
    return request.headers.get(owner_keys.HEADER, "")


async def read_fields(
    request: Request, schema: type[RequestT], options: HttpOptions
) -> tuple[RequestT, dict[str, str]]:
    """Read and parse the body. Returns its fields, and the headers that the response must carry."""
    async with aclosing(read_pieces(request, options.max_input_bytes)) as pieces:
        fields, ignored = await parse_pieces_of_body(schema, pieces, options.is_strict)
    return fields, warning_header(ignored)


def json_response(payload: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(payload), status, headers, "application/json")


def format_collection(info: CollectionInfo) -> JsonObject:
    """Format a collection. `created` is in Unix seconds; `is_protected` collections need an owner key."""
    return {
        "name": info.spec.name,
        "object": "collection",
        "encoder": info.spec.encoder,
        "dim": info.spec.dim,
        "num_documents": info.num_documents,
        "num_chunks": info.num_chunks,
        "created": int(info.created_s),
        "is_protected": bool(info.spec.key_hashes),
    }


def format_document(info: DocumentInfo) -> JsonObject:
    """Format a document without its text. `updated` is in Unix seconds; docs/rag.md explains `content_hash`."""
    return {
        "id": info.id,
        "object": "document",
        "title": info.title,
        "format": info.format.value,
        "content_hash": info.content_hash,
        "num_chars": info.num_chars,
        "num_chunks": info.num_chunks,
        "metadata": dict(info.metadata),
        "updated": int(info.updated_s),
    }


def format_list(items: list[JsonObject], **more: Any) -> JsonObject:
    return {"object": "list", "data": items, **more}
