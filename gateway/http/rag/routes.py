"""RAG's API: collections, documents in them, and questions to them."""

from fastapi import APIRouter, Response

from gateway.http.rag.asking import AskingRoutes
from gateway.http.rag.collections import CollectionRoutes
from gateway.http.rag.documents import DocumentRoutes
from gateway.http.rag.openapi import (
    DOCUMENT_BODY,
    DOCUMENTS_BODY,
    KEY_HEADER,
    body_of,
    with_scheduling,
)
from gateway.http.rag.schemas import CollectionRequest, QueryRequest, SearchRequest
from gateway.options.config import ServeConfig
from gateway.service import InferenceService
from pipelines.rag.library import DocumentLibrary


def router(service: InferenceService, library: DocumentLibrary, config: ServeConfig) -> APIRouter:
    """The routes under /v1/rag."""
    api = APIRouter(prefix="/v1/rag", tags=["RAG"], default_response_class=Response)
    _add_collections(api, CollectionRoutes(library, config.http))  # first: their path looks like a collection's
    _add_documents(api, DocumentRoutes(library, config.http))
    asking = AskingRoutes(service, library, config)
    api.post("/{collection}/query", openapi_extra=with_scheduling(body_of(QueryRequest)))(asking.query)
    api.post("/{collection}/search", openapi_extra=body_of(SearchRequest))(asking.search)
    return api


def _add_collections(api: APIRouter, routes: CollectionRoutes) -> None:
    api.get("/collections")(routes.list_all)
    api.post("/collections", status_code=201, openapi_extra=body_of(CollectionRequest))(routes.create)
    api.get("/collections/{name}", openapi_extra=KEY_HEADER)(routes.get)
    api.delete("/collections/{name}", openapi_extra=KEY_HEADER)(routes.delete)


def _add_documents(api: APIRouter, routes: DocumentRoutes) -> None:
    path = "/{collection}/documents"
    one = path + "/{document_id:path}"
    api.post(path, openapi_extra=DOCUMENTS_BODY)(routes.add)
    api.get(path, openapi_extra=KEY_HEADER)(routes.list_all)
    api.put(one, openapi_extra=DOCUMENT_BODY)(routes.put)
    api.get(one, openapi_extra=KEY_HEADER)(routes.get)
    api.delete(one, openapi_extra=KEY_HEADER)(routes.delete)
