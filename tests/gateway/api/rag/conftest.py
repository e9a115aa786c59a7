from collections.abc import Iterator

import pytest

from tests.gateway.api.rag.parts import RagServer, rag_server


@pytest.fixture(scope="session")
def shared_rag() -> Iterator[RagServer]:
    with rag_server() as server:
        yield server


@pytest.fixture
def rag(shared_rag: RagServer) -> RagServer:
    """A server without collections, whose pipeline has not answered yet."""
    shared_rag.reset()
    return shared_rag
