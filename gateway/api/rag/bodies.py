"""JSON bodies of responses, as all RAG routes write them."""

from typing import Any

from fastapi import Request

from sluice.pipelines.rag.types import CollectionInfo, DocumentInfo
from sluice.pipelines.text.types import OWNER_KEY_HEADER

JsonObject = dict[str, Any]


def collection_key(request: Request) -> str:
    """Return the owner key of the request, "" for none."""
    return request.headers.get(OWNER_KEY_HEADER, "")


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
