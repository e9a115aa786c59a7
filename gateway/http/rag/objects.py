"""Collections and documents as JSON objects."""

from typing import Any

from pipelines.rag.types import CollectionInfo, DocumentInfo

JsonObject = dict[str, Any]


def collection_object(info: CollectionInfo) -> JsonObject:
    """`created` in Unix seconds. `is_protected`: only who has an owner's key may read and change it."""
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


def document_object(info: DocumentInfo) -> JsonObject:
    """`content_hash` as docs/rag.md has it; `updated` in Unix seconds."""
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


def list_object(items: list[JsonObject], **more: Any) -> JsonObject:
    return {"object": "list", "data": items, **more}
