"""The vectors that come with the documentation belong to this documentation and to the bundled encoder."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from sluice.gateway.bundled import DOCUMENTATION_COLLECTION, documentation
from sluice.gateway.documentation import VECTORS, ingest_documentation, load_vectors, save_vectors
from sluice.pipelines.encoding import Vectors
from sluice.pipelines.encoding.encoder import TextEncoder
from sluice.pipelines.rag.library import DocumentLibrary, LibrarySettings
from sluice.pipelines.rag.stores.sqlite.store import SqliteStore
from tests.pipelines.rag.bundled import copy_models, serving

MOST_OTHERS = 0.1
"""The share of chunks that a first start may have to encode, in seconds. So the file changes with a tenth of the
documentation, and not with each wording."""


class CountingEncoder(TextEncoder):
    """Notes the texts that are encoded."""

    encoded: list[str]

    async def encode_documents(self, texts: Sequence[str]) -> Vectors:
        self.encoded += texts
        return await super().encode_documents(texts)


@pytest.mark.slow
async def test_a_first_start_encodes_one_chunk_of_each_document_and_the_few_that_were_reworded(tmp_path: Path) -> None:
    async with serving(copy_models(tmp_path)) as models:
        encoder = CountingEncoder(models, "query_encoder")
        encoder.encoded = []
        library = DocumentLibrary(SqliteStore(None), lambda name: encoder, LibrarySettings())
        await ingest_documentation(library)
        info = await library.collection(DOCUMENTATION_COLLECTION)
        await library.close()
    num_others = len(encoder.encoded) - len(documentation())
    assert info.num_documents == len(documentation())
    assert num_others <= MOST_OTHERS * info.num_chunks, "much of the documentation has changed: run `make vectors`"


def test_saved_vectors_are_loaded_in_half_precision_and_are_few_bytes(tmp_path: Path) -> None:
    known = load_vectors(VECTORS)
    save_vectors(known, tmp_path / "again.npz")
    again = load_vectors(tmp_path / "again.npz")
    assert again.keys() == known.keys()
    assert all((again[digest] == known[digest]).all() for digest in known)
    assert VECTORS.stat().st_size < 850 * len(known)
