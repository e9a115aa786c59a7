"""Row ids of chunks: a document's row id above, the chunk's place in the document below.

So a ranking needs no look into another table to know a chunk's document, and ids rise in the order in which chunks
came. Documents' row ids are given once only (AUTOINCREMENT), and with them those of chunks.
"""

import numpy as np
import numpy.typing as npt

_INDEX_BITS = 20
MAX_CHUNKS = 1 << _INDEX_BITS
"""Of one document."""
DOCUMENT_SQL = f"({{0}} >> {_INDEX_BITS})"
"""In SQL, the row id of the document of the chunk {0}."""
FIRST_SQL = f"({{0}} << {_INDEX_BITS})"
LAST_SQL = f"(({{0}} + 1 << {_INDEX_BITS}) - 1)"
"""In SQL, the bounds of the chunks of the document {0}."""

Ids = npt.NDArray[np.int64]


def first_of(document: int) -> int:
    return document << _INDEX_BITS


def bounds(document: int) -> tuple[int, int]:
    """The least and the greatest id that a chunk of the document may have."""
    return first_of(document), first_of(document + 1) - 1


def documents_of(chunks: Ids) -> Ids:
    return chunks >> _INDEX_BITS


def index_of(chunk: int) -> int:
    """Its place in the document."""
    return chunk & (MAX_CHUNKS - 1)
