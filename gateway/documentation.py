"""Keeps Sluice's own documentation in a collection, from which the bundled pipeline answers."""

import asyncio
import logging
from pathlib import Path

import numpy as np

from sluice.errors import SluiceError
from sluice.gateway.bundled import DOCUMENTATION_COLLECTION, documentation
from sluice.pipelines.encoding import Vector
from sluice.pipelines.rag.library import DocumentLibrary, KnownVectors, PutResult, PutStatus
from sluice.pipelines.rag.types import DocumentFormat, Upload

log = logging.getLogger(__name__)

VECTORS = Path(__file__).with_name("documentation.npz")
"""Vectors of the documentation's chunks (`make vectors`), so that a first start need not encode them."""
_MAX_DOCUMENTS = 1000
"""An upper bound on the number of documents, so that one page lists them all."""


async def ingest_documentation(library: DocumentLibrary, vectors: Path | None = VECTORS) -> None:
    """Update the collection `sluice` to this version's documentation. Unchanged documents are not encoded again.

    Chunks whose vectors are in the file `vectors` are not encoded at all, if those are the vectors of the encoder.
    A failure, such as a store that is down, is only logged: the server serves without its documentation.
    """
    try:
        num_changed = await _put_all(library, vectors)
    except SluiceError as error:
        log.warning("Sluice's documentation is not in collection '%s': %s", DOCUMENTATION_COLLECTION, error.message)
        return
    except Exception:
        log.exception("Sluice's documentation is not in collection '%s'", DOCUMENTATION_COLLECTION)
        return
    if num_changed:
        log.info("collection '%s': %d documents of Sluice's documentation read", DOCUMENTATION_COLLECTION, num_changed)


async def _put_all(library: DocumentLibrary, vectors: Path | None) -> int:
    found = documentation()
    known = {} if vectors is None else await asyncio.to_thread(load_vectors, vectors)
    results = await asyncio.gather(*(_put(library, name, path, known) for name, path in found.items()))
    for info in await library.documents(DOCUMENTATION_COLLECTION, limit=_MAX_DOCUMENTS):
        if info.id not in found:
            await library.delete_document(DOCUMENTATION_COLLECTION, info.id)
    return sum(each.status is not PutStatus.UNCHANGED for each in results)


async def _put(library: DocumentLibrary, name: str, path: Path, known: KnownVectors) -> PutResult:
    content = await asyncio.to_thread(path.read_bytes)
    return await library.put(DOCUMENTATION_COLLECTION, Upload(name, content, DocumentFormat.MARKDOWN), known=known)


def load_vectors(path: Path) -> dict[bytes, Vector]:
    """Load the vectors that come with this version, by the hash of their text. Blocks."""
    with np.load(path) as file:
        hashes, vectors = file["hashes"], file["vectors"].astype(np.float32)
    return {digest.tobytes(): vector for digest, vector in zip(hashes, vectors, strict=True)}


def save_vectors(known: KnownVectors, path: Path) -> None:
    """Save vectors in half precision, in the order of their hashes, so that equal vectors make equal files. Blocks."""
    hashes = np.array([np.frombuffer(digest, np.uint8) for digest in sorted(known)])
    vectors = np.array([known[digest] for digest in sorted(known)], np.float16)
    np.savez(path, hashes=hashes, vectors=vectors)
