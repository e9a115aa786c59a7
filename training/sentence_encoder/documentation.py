"""Encodes Sluice's documentation with the bundled encoder, for `gateway/documentation.npz`.

    make vectors

A server encodes only the chunks that the file lacks, so a stale file costs time at the first start and nothing else.
"""

import asyncio
from collections.abc import Sequence

from benchmarks.rag.corpus import bundled_models
from sluice.gateway.documentation import VECTORS, ingest_documentation, load_vectors, save_vectors
from sluice.pipelines.encoding import Vector, Vectors
from sluice.pipelines.encoding.encoder import TextEncoder
from sluice.pipelines.rag.library import DocumentLibrary, LibrarySettings, hash_text
from sluice.pipelines.rag.stores.sqlite.store import SqliteStore
from sluice.serving.backend import ModelLookup

ENCODER = "query_encoder"
_SAME_COSINE = 0.999


class RecordingEncoder(TextEncoder):
    """An encoder that keeps the vectors of all documents that it encodes."""

    def __init__(self, models: ModelLookup, name: str) -> None:
        super().__init__(models, name)
        self.vectors: dict[bytes, Vector] = {}

    async def encode_documents(self, texts: Sequence[str]) -> Vectors:
        encoded = await super().encode_documents(texts)
        self.vectors.update((hash_text(text), vector) for text, vector in zip(texts, encoded, strict=True))
        return encoded


async def encode_documentation() -> dict[bytes, Vector]:
    """Return the vectors of all chunks of the documentation."""
    async with bundled_models(ENCODER) as repository:
        encoder = RecordingEncoder(repository, ENCODER)
        library = DocumentLibrary(SqliteStore(None), lambda name: encoder, LibrarySettings())
        try:
            await ingest_documentation(library, None)
        finally:
            await library.close()
    return encoder.vectors


def main() -> None:
    known, encoded = load_vectors(VECTORS) if VECTORS.exists() else {}, asyncio.run(encode_documentation())
    current = {digest: _choose(known.get(digest), vector) for digest, vector in encoded.items()}
    save_vectors(current, VECTORS)
    print(f"{VECTORS}: {len(current)} vectors, {VECTORS.stat().st_size // 1024} KiB")


def _choose(known: Vector | None, encoded: Vector) -> Vector:
    """Return the vector of the file if it is as good: every kind of CPU rounds otherwise."""
    return known if known is not None and float(known @ encoded) >= _SAME_COSINE else encoded


if __name__ == "__main__":
    main()
