"""The speed of parsing and chunking documents, by format, without encoder and store.

    python -m benchmarks.rag.ingestion_parts [--repeats 3]

Each document holds the same prose under headings, about a megabyte. Parsing includes the start of the process where the
format has one. Chunking takes the parsed text, with its words as tokens.
"""

import argparse
import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

from benchmarks.figures import Figure, print_figures
from sluice.pipelines.rag.chunker import ChunkOptions, chunk_document
from sluice.pipelines.rag.documents.parse import ParseLimits, parse_document
from sluice.pipelines.rag.types import DocumentFormat
from tests.pipelines.rag.documents.pdf_writer import Pdf

NUM_SECTIONS = 2000
PARAGRAPH = (
    "A chunk is about one thing where it keeps to one section. Its length is counted in the tokens of the encoder. "
    "Where a paragraph is too long, it is cut between sentences; what is shared keeps the thread (see above). "
) * 2
LINE_WORDS = 12
_WORD = re.compile(r"\w{1,6}|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Throughput:
    """Characters of text per second."""

    reading: float
    cutting: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    print_figures(asyncio.run(ingestion_parts(parser.parse_args().repeats)), Console())


async def ingestion_parts(repeats: int) -> list[Figure]:
    """Measure parsing and chunking, one figure each for every format."""
    figures = []
    for format, document in _DOCUMENTS.items():
        content = document()
        paces = [await _pace(content, format) for _ in range(repeats)]
        for name, samples in (("read", [p.reading for p in paces]), ("cut", [p.cutting for p in paces])):
            megas = tuple(round(sample / 1e6, 2) for sample in samples)
            figures.append(Figure(name, format.value, "million chars/s", megas))
    return figures


async def _pace(content: bytes, format: DocumentFormat) -> Throughput:
    began_s = time.perf_counter()
    document = await parse_document(content, format, ParseLimits())
    read_s = time.perf_counter()
    starts = [match.start() for match in _WORD.finditer(document.text)]
    cut_s = time.perf_counter()
    chunk_document(document, starts, ChunkOptions())
    ended_s = time.perf_counter()
    num_chars = len(document.text)
    return Throughput(num_chars / (read_s - began_s), num_chars / (ended_s - cut_s))


def _text() -> bytes:
    return "".join(f"Section {number}\n\n{PARAGRAPH}\n\n" for number in range(NUM_SECTIONS)).encode()


def _markdown() -> bytes:
    return "".join(f"## Section {number}\n\n{PARAGRAPH}\n\n" for number in range(NUM_SECTIONS)).encode()


def _html() -> bytes:
    return "".join(f"<h2>Section {number}</h2>\n<p>{PARAGRAPH}</p>\n" for number in range(NUM_SECTIONS)).encode()


def _pdf() -> bytes:
    words = PARAGRAPH.split()
    lines = [" ".join(words[start : start + LINE_WORDS]) for start in range(0, len(words), LINE_WORDS)]
    sections = [[f"Section {number}", "", *lines, ""] for number in range(NUM_SECTIONS)]
    return Pdf(sections).to_bytes()


_DOCUMENTS: dict[DocumentFormat, Callable[[], bytes]] = {
    DocumentFormat.TEXT: _text,
    DocumentFormat.MARKDOWN: _markdown,
    DocumentFormat.HTML: _html,
    DocumentFormat.PDF: _pdf,
}

if __name__ == "__main__":
    main()
