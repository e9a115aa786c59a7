"""What /docs says of the RAG routes' bodies and headers. FastAPI knows nothing of them, as we parse them ourselves."""

from typing import Any

from pydantic import BaseModel

from gateway.http import openapi
from gateway.http.rag.schemas import DocumentsRequest
from gateway.http.request import SCHEDULING_PARAMETERS
from pipelines.rag import keys

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_TEXT = {"schema": {"type": "string"}}
_RAW = {
    "text/plain": _TEXT,
    "text/markdown": _TEXT,
    "text/html": _TEXT,
    "application/pdf": _BINARY,
}
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
    "name": keys.HEADER,
    "in": "header",
    "schema": {"type": "string"},
    "description": "The collection's owner key, where it has one.",
}


def _query(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": {"type": "string"}, "description": description}


_OF_RAW = [_query("title", "Of a body that is one document."), _query("metadata", "Of such a one: a JSON object.")]
_ID = _query("id", "Of a body that is one document.")

KEY_HEADER: dict[str, Any] = {"parameters": [_KEY]}


def body_of(schema: type[BaseModel]) -> dict[str, Any]:
    """What an operation's OpenAPI entry says of its JSON body and headers."""
    return {**openapi.describe_body(schema), **KEY_HEADER}


def with_scheduling(operation: dict[str, Any]) -> dict[str, Any]:
    """The operation with the headers that say when a request is served."""
    return {**operation, "parameters": [*operation["parameters"], *SCHEDULING_PARAMETERS]}


def _several() -> dict[str, Any]:
    json = openapi.describe_body(DocumentsRequest)["requestBody"]["content"]
    content = {**json, "application/x-ndjson": _LINES, "multipart/form-data": _FORM, **_RAW}
    return {"requestBody": {"required": True, "content": content}, "parameters": [_KEY, _ID, *_OF_RAW]}


DOCUMENTS_BODY = _several()
DOCUMENT_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": _RAW},
    "parameters": [_KEY, *_OF_RAW],
}
