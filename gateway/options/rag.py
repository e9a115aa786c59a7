"""Options of retrieval-augmented generation: those of `sluice serve`, and those of its client `sluice rag`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sluice.gateway.options.option import OptionError, integer, option, printable_text, size, truth

if TYPE_CHECKING:
    from sluice.pipelines.rag.library import LibrarySettings

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
        printable_text("the path of a file, or postgresql://USER:PASSWORD@HOST:PORT/DATABASE"),
        "PATH|URL",
        "store of documents, their text and vectors: a SQLite file, or a Postgres with pgvector, which several "
        "servers may share. Default: sluice/rag.sqlite in $XDG_DATA_HOME or ~/.local/share",
        secret=True,
    )
    data_home: str | None = option(
        "--data-home",
        None,
        printable_text("the path of a folder"),
        "PATH",
        "folder of sluice/rag.sqlite and sluice/state unless --rag-store and --state-path say otherwise",
        variable="XDG_DATA_HOME",
    )
    encoder: str = option(
        "--rag-encoder",
        "query_encoder",
        printable_text("the name of a model"),
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
        "tokens that neighbouring chunks share, so that no sentence loses its context",
    )
    max_document_bytes: int = option(
        "--rag-max-document-size",
        64 << 20,
        size(1),
        "SIZE",
        "longest document. --http-max-input-size bounds the request that brings it",
    )

    def __post_init__(self) -> None:
        """Check options against each other. Raises OptionError."""
        if self.chunk_overlap_tokens * 2 > self.chunk_tokens:
            raise OptionError(
                f"--rag-chunk-overlap must be at most half of --rag-chunk-tokens ({self.chunk_tokens}), "
                f"got {self.chunk_overlap_tokens}"
            )

    def store_place(self) -> str:
        """Return the file or URL of the store."""
        if self.store is not None:
            return self.store
        return str(self.data_folder() / "rag.sqlite")

    def data_folder(self) -> Path:
        """Return the folder of what outlives the server, where no option names another place."""
        home = Path(self.data_home) if self.data_home is not None else Path.home() / ".local" / "share"
        return home / "sluice"

    def library_settings(self) -> "LibrarySettings":
        """Return the library's settings."""
        from sluice.pipelines.rag.chunker import ChunkOptions
        from sluice.pipelines.rag.documents.parse import ParseLimits
        from sluice.pipelines.rag.library import LibrarySettings

        chunks = ChunkOptions(self.chunk_tokens, self.chunk_overlap_tokens)
        return LibrarySettings(self.encoder, chunks, ParseLimits(max_bytes=self.max_document_bytes))


def parse_web_address(text: str) -> str:
    """Parse the URL of an HTTP server, without the slash at its end."""
    allowed = "the URL of a server, such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(text)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        raise ValueError(allowed) from None
    if not is_one or parts.query or parts.fragment or not text.isprintable():
        raise ValueError(allowed)
    return text.rstrip("/")


def parse_header_text(text: str) -> str:
    """Parse text that a header can carry."""
    if not text.strip() or not text.isascii() or not text.isprintable():
        raise ValueError("printable ASCII text that is not empty")
    return text


@dataclass(frozen=True, slots=True)
class RagClientOptions:
    """The server"""

    url: str = option("--url", "http://127.0.0.1:8000", parse_web_address, "URL", "the server's address")
    api_key: str | None = option(
        "--api-key",
        None,
        parse_header_text,
        "KEY",
        "the server's API key, where it asks for one. Better set SLUICE_API_KEY: every user of the machine can read a "
        "command line",
        secret=True,
    )
    collection_key: str | None = option(
        "--key",
        None,
        parse_header_text,
        "KEY",
        "the collection's owner key; a collection that ingest makes is owned by it. Better set SLUICE_COLLECTION_KEY",
        secret=True,
        variable="SLUICE_COLLECTION_KEY",
    )
