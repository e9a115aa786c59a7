"""Restricted APIs that require a header, and the server's API key."""

import pytest

from gateway.http.access import find_api_category
from gateway.options.config import ServeConfig
from gateway.options.http import HttpOptions
from gateway.restrictions import ApiCategory, parse_restriction
from tests.gateway.http.rag.parts import rag_server


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/rag/docs/query", ApiCategory.INFERENCE),
        ("/v1/rag/docs/search", ApiCategory.INFERENCE),
        ("/v1/rag/docs/documents", ApiCategory.MODEL_REPOSITORY),
        ("/v1/rag/docs/documents/a/query", ApiCategory.MODEL_REPOSITORY),
        ("/v1/rag/collections", ApiCategory.MODEL_REPOSITORY),
        ("/v1/rag/collections/docs", ApiCategory.MODEL_REPOSITORY),
        ("/v1/embeddings", ApiCategory.INFERENCE),
        ("/pooling", ApiCategory.INFERENCE),
        ("/tokenize", ApiCategory.INFERENCE),
        ("/rerank", ApiCategory.INFERENCE),
        ("/v2/rerank", ApiCategory.INFERENCE),
        ("/v1/score", ApiCategory.INFERENCE),
        ("/ping", ApiCategory.HEALTH),
        ("/version", ApiCategory.METADATA),
    ],
)
def test_which_part_a_path_belongs_to(path: str, api: ApiCategory) -> None:
    assert find_api_category(path) is api


def test_documents_may_be_restricted_while_questions_are_not() -> None:
    config = ServeConfig(http=HttpOptions(restrictions=(parse_restriction("model-repository:admin=secret"),)))
    with rag_server(config) as server:
        assert server.add("docs", {"id": "a.txt", "text": "x"}).status_code == 403
        assert server.add("docs", {"id": "a.txt", "text": "x"}, headers={"admin": "secret"}).status_code == 200
        assert server.ask("POST", "/docs/search", json={"question": "x"}).status_code == 200
