"""The options of `sluice serve` for retrieval-augmented generation."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.options.option import ConfigError, integer, option, size, text_of, truth

if TYPE_CHECKING:
    from pipelines.rag.library import LibrarySettings

MIN_CHUNK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class RagOptions:
    """Documents and RAG: collections under /v1/rag, and the bundled pipeline that answers from them"""

    is_served: bool | None = option(
        "--rag",
        None,
        truth,
        "BOOL",
        "serve the bundled pipeline rag_pipeline around MODEL: sentence encoder, retriever, prompt. Default: where "
        "neither MODEL nor --model-repository is given. A repository brings models of its own",
    )
    store: str | None = option(
        "--rag-store",
        None,
        text_of("the path of a file, or postgresql://USER:PASSWORD@HOST:PORT/DATABASE"),
        "PATH|URL",
        "where documents, their text and vectors are kept: a SQLite file, or a Postgres with pgvector, which several "
        "servers may share. Default: sluice/rag.sqlite in $XDG_DATA_HOME or ~/.local/share",
        secret=True,
    )
    data_home: str | None = option(
        "--data-home",
        None,
        text_of("the path of a folder"),
        "PATH",
        "where sluice/rag.sqlite lies unless --rag-store says otherwise",
        variable="XDG_DATA_HOME",
    )
    encoder: str = option(
        "--rag-encoder",
        "query_encoder",
        text_of("the name of a model"),
        "NAME",
        "the model that makes vectors of texts, for new collections: any with a text or token input",
    )
    chunk_tokens: int = option(
        "--rag-chunk-tokens",
        160,
        integer(MIN_CHUNK_TOKENS, 8192),
        "COUNT",
        "longest chunk of a document, in the encoder's tokens. Longer ones tell more, and fewer fit into a prompt",
    )
    chunk_overlap_tokens: int = option(
        "--rag-chunk-overlap",
        24,
        integer(0, 4096),
        "COUNT",
        "tokens that neighbouring chunks share, so that no sentence loses what stands before it",
    )
    max_document_bytes: int = option(
        "--rag-max-document-size",
        64 << 20,
        size(1),
        "SIZE",
        "longest document. --http-max-input-size bounds the request that brings it",
    )

    def __post_init__(self) -> None:
        """Check what options say together. Raises ConfigError."""
        if self.chunk_overlap_tokens * 2 > self.chunk_tokens:
            raise ConfigError(
                f"--rag-chunk-overlap must be at most half of --rag-chunk-tokens ({self.chunk_tokens}), "
                f"got {self.chunk_overlap_tokens}"
            )

    def store_place(self) -> str:
        """The file or URL of the store."""
        if self.store is not None:
            return self.store
        home = Path(self.data_home) if self.data_home is not None else Path.home() / ".local" / "share"
        return str(home / "sluice" / "rag.sqlite")

    def library_settings(self) -> "LibrarySettings":
        """The library's part."""
        from pipelines.rag.chunker import ChunkOptions
        from pipelines.rag.documents.parse import ParseLimits
        from pipelines.rag.library import LibrarySettings

        chunks = ChunkOptions(self.chunk_tokens, self.chunk_overlap_tokens)
        return LibrarySettings(self.encoder, chunks, ParseLimits(max_bytes=self.max_document_bytes))
