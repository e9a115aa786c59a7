"""Cuts a document where its structure allows, to a number of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.rag.types import Chunk, ParsedDocument


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """In the encoder's tokens. A chunk is never longer than `max_tokens`; neighbours of one section share `overlap`."""

    max_tokens: int = 160
    overlap_tokens: int = 24


def chunk_document(document: ParsedDocument, token_starts: Sequence[int], options: ChunkOptions) -> list[Chunk]:
    """All of the document's text that is not white space, in order. Pure.

    `token_starts`: where each token of `document.text` begins, in characters, rising.
    """
    raise NotImplementedError
