"""The routes under /v1/rag, the handlers of collections, and what /docs says of bodies and headers."""

from typing import Any

from fastapi import APIRouter, Request, Response

from sluice.gateway.api.rag.bodies import collection_key, format_collection, format_list
from sluice.gateway.api.rag.documents import DocumentRoutes
from sluice.gateway.api.rag.queries import QueryRoutes
from sluice.gateway.api.rag.schemas import CollectionRequest, DocumentsRequest, QueryRequest, SearchRequest
from sluice.gateway.api.translators import Answering
from sluice.gateway.front.http import openapi
from sluice.gateway.front.http.bodies import json_response, read_fields
from sluice.gateway.front.http.parsing import RequestObject
from sluice.gateway.front.http.request import SCHEDULING_PARAMETERS
from sluice.gateway.options.http import HttpOptions
from sluice.pipelines.rag.library import DocumentLibrary
from sluice.pipelines.text.types import OWNER_KEY_HEADER

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_TEXT = {"schema": {"type": "string"}}
_RAW = {"text/plain": _TEXT, "text/markdown": _TEXT, "text/html": _TEXT, "application/pdf": _BINARY}
_LINES = {"schema": {"type": "string", "description": "A document a line: id, text, format, title, metadata."}}
_FORM = {
    "schema": {
        "type": "object",
        "required": ["file"],
        "properties": {
            "file": {"type": "array", "items": {"type": "string", "format": "binary"}},
            "id": {"type": "string", "description": "For a form with one file. Default: the file's name."},
            "title": {"type": "string", "description": "For a form with one file."},
            "metadata": {"type": "string", "description": "A JSON object, for all files."},
        },
    }
}
_KEY = {
    "name": OWNER_KEY_HEADER,
    "in": "header",
    "schema": {"type": "string"},
    "description": "The collection's owner key, where it has one.",
}
_WITH_KEY: dict[str, Any] = {"parameters": [_KEY]}


class CollectionRoutes:
    """The handlers of collections over one library."""

    def __init__(self, library: DocumentLibrary, options: HttpOptions) -> None:
        self._library = library
        self._options = options

    async def list_all(self) -> Response:
        """List all collections. Names and sizes are not secret."""
        return json_response(format_list([format_collection(info) for info in await self._library.collections()]))

    async def create(self, request: Request) -> Response:
        """Create an empty collection, owned by the key in x-sluice-collection-key if there is one."""
        fields, headers = await read_fields(request, CollectionRequest, self._options)
        info = await self._library.create_collection(fields.name, fields.encoder or "", collection_key(request))
        return json_response(format_collection(info), 201, headers)

    async def get(self, request: Request, name: str) -> Response:
        """Get one collection."""
        return json_response(format_collection(await self._library.collection(name, collection_key(request))))

    async def delete(self, request: Request, name: str) -> Response:
        """Delete a collection with all that it holds."""
        await self._library.delete_collection(name, collection_key(request))
        return json_response({"name": name, "object": "collection", "deleted": True})


def router(answering: Answering, library: DocumentLibrary, options: HttpOptions) -> APIRouter:
    api = APIRouter(prefix="/v1/rag", tags=["RAG"], default_response_class=Response)
    _add_collections(api, CollectionRoutes(library, options))  # first: their path looks like a collection's
    _add_documents(api, DocumentRoutes(library, options))
    routes = QueryRoutes(answering, library, options)
    api.post("/{collection}/query", openapi_extra=_describe_body(QueryRequest, *SCHEDULING_PARAMETERS))(routes.query)
    api.post("/{collection}/search", openapi_extra=_describe_body(SearchRequest))(routes.search)
    return api


def _add_collections(api: APIRouter, routes: CollectionRoutes) -> None:
    api.get("/collections")(routes.list_all)
    api.post("/collections", status_code=201, openapi_extra=_describe_body(CollectionRequest))(routes.create)
    api.get("/collections/{name}", openapi_extra=_WITH_KEY)(routes.get)
    api.delete("/collections/{name}", openapi_extra=_WITH_KEY)(routes.delete)


def _add_documents(api: APIRouter, routes: DocumentRoutes) -> None:
    path = "/{collection}/documents"
    one = path + "/{document_id:path}"
    api.post(path, openapi_extra=_describe_documents())(routes.add)
    api.get(path, openapi_extra=_WITH_KEY)(routes.list_all)
    document = {"requestBody": {"required": True, "content": _RAW}, "parameters": [_KEY, *_raw_parameters()]}
    api.put(one, openapi_extra=document)(routes.put)
    api.get(one, openapi_extra=_WITH_KEY)(routes.get)
    api.delete(one, openapi_extra=_WITH_KEY)(routes.delete)


def _describe_body(schema: type[RequestObject], *parameters: dict[str, Any]) -> dict[str, Any]:
    return {**openapi.describe_body(schema), "parameters": [_KEY, *parameters]}


def _describe_documents() -> dict[str, Any]:
    """Describe a body of several documents, in any of its forms, or of one document as it is."""
    json = openapi.describe_body(DocumentsRequest)["requestBody"]["content"]
    content = {**json, "application/x-ndjson": _LINES, "multipart/form-data": _FORM, **_RAW}
    document_id = _query_parameter("id", "Id of a body that is one document.")
    return {
        "requestBody": {"required": True, "content": content},
        "parameters": [_KEY, document_id, *_raw_parameters()],
    }


def _raw_parameters() -> list[dict[str, Any]]:
    return [
        _query_parameter("title", "Title of a body that is one document."),
        _query_parameter("metadata", "Metadata of a body that is one document: a JSON object."),
    ]


def _query_parameter(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": {"type": "string"}, "description": description}
