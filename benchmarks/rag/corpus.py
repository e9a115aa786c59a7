"""The corpus of the retrieval benchmarks: a library with Python's documentation from its Debian package."""

import re
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import BenchmarkError, ReportProgress
from sluice.bundled import models_folder
from sluice.pipelines.encoding.encoder import TextEncoder
from sluice.pipelines.rag.library import DocumentLibrary, LibrarySettings
from sluice.pipelines.rag.stores.opening import open_store
from sluice.pipelines.rag.types import DocumentFormat, Upload
from sluice.serving.backend import BackendContext
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode
from training.rill.sources import SOURCES, fetch

COLLECTION = "python"
_PAGES = r"library/|tutorial/|faq/|howto/|reference/|using/"


@dataclass(frozen=True, slots=True)
class Corpus:
    """A library with the collection `python`, and the cost of ingestion: 0 documents where nothing changed."""

    library: DocumentLibrary
    num_documents: int
    num_chunks: int
    seconds: float


@asynccontextmanager
async def python_corpus(
    out: Path, report: ReportProgress, settings: LibrarySettings | None = None
) -> AsyncGenerator[Corpus, None]:
    """Yield the corpus, encoded by the bundled encoder and kept under `out`. Only changed pages are encoded again."""
    folder = _pages_folder(out)
    async with bundled_models("query_encoder") as repository:
        store = open_store(str(out / "rag" / "python.sqlite"))
        library = DocumentLibrary(store, lambda name: TextEncoder(repository, name), settings or LibrarySettings())
        try:
            yield await _ingest(library, folder, report)
        finally:
            await library.close()


@asynccontextmanager
async def bundled_models(*names: str) -> AsyncGenerator[ModelRepository, None]:
    """Yield a repository that serves these bundled models and the models that they call."""
    repository = ModelRepository([models_folder()], ControlMode.EXPLICIT, BackendContext)
    failures = await repository.start(names)
    if failures:
        raise BenchmarkError("; ".join(failure.message for failure in failures.values()))
    try:
        yield repository
    finally:
        await repository.close()


def _pages_folder(out: Path) -> Path:
    [source] = [each for each in SOURCES if each.name == "python"]
    fetch(source, out / "rag")
    return source.folder(out / "rag")


async def _ingest(library: DocumentLibrary, folder: Path, report: ReportProgress) -> Corpus:
    pages = _pages(folder)
    started, num_ingested, num_chunks = time.perf_counter(), 0, 0
    for number, path in enumerate(pages):
        upload = Upload(path.relative_to(folder).as_posix(), path.read_bytes(), DocumentFormat.HTML)
        result = await library.put(COLLECTION, upload)
        if result.status != "unchanged":
            num_ingested += 1
            num_chunks += result.info.num_chunks
        if number % 50 == 49:
            report(f"{number + 1} of {len(pages)} pages, {num_chunks} chunks encoded")
    return Corpus(library, num_ingested, num_chunks, time.perf_counter() - started)


def _pages(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*.html")) if re.match(_PAGES, path.relative_to(folder).as_posix())]
