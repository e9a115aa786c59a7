"""The vectors that come with the documentation belong to this documentation and to the bundled encoder."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from sluice.gateway.bundled import DOCUMENTATION_COLLECTION, documentation
from sluice.gateway.documentation import VECTORS, ingest_documentation, load_vectors, save_vectors
from sluice.pipelines.rag.encoder import TextEncoder
from sluice.pipelines.rag.library import DocumentLibrary, LibrarySettings
from sluice.pipelines.rag.stores.sqlite.store import SqliteStore
from sluice.pipelines.rag.types import Vectors
from tests.pipelines.rag.bundled import copy_models, serving


class CountingEncoder(TextEncoder):
    """Notes the texts that are encoded."""

    encoded: list[str]

    async def encode_documents(self, texts: Sequence[str]) -> Vectors:
        self.encoded += texts
        return await super().encode_documents(texts)


@pytest.mark.slow
async def test_a_first_start_encodes_one_chunk_of_each_document_to_check_the_vectors_of_the_others(
    tmp_path: Path,
) -> None:
    async with serving(copy_models(tmp_path)) as models:
        encoder = CountingEncoder(models, "query_encoder")
        encoder.encoded = []
        library = DocumentLibrary(SqliteStore(None), lambda name: encoder, LibrarySettings())
        await ingest_documentation(library)
        info = await library.collection(DOCUMENTATION_COLLECTION)
        await library.close()
    remedy = "the documentation or the encoder has changed: run `make vectors`"
    assert info.num_documents == len(documentation()) == len(encoder.encoded), remedy
    assert info.num_chunks == len(load_vectors(VECTORS)), remedy


def test_saved_vectors_are_loaded_in_half_precision_and_are_few_bytes(tmp_path: Path) -> None:
    known = load_vectors(VECTORS)
    save_vectors(known, tmp_path / "again.npz")
    again = load_vectors(tmp_path / "again.npz")
    assert again.keys() == known.keys()
    assert all((again[digest] == known[digest]).all() for digest in known)
    assert VECTORS.stat().st_size < 850 * len(known)
