"""The share of questions that the bundled model answers with the right sentence, with retrieval and without.

Every question goes through a server, as a client's does. The facts are from pages of Python's documentation that rill
was not trained on. Their questions are worded as in its training; the reworded set words them otherwise. The office
documents and their questions were written for this benchmark. The right answer is the sentence and nothing else;
another sentence that answers as well counts as wrong. No document answers an unanswerable question.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import uvloop

from benchmarks.figures import BenchmarkError, Figure, ReportProgress
from benchmarks.rag.corpus import COLLECTION, python_corpus
from benchmarks.server import running_server
from sluice.pipelines.rag.library import DocumentLibrary
from sluice.pipelines.rag.types import DocumentFormat, Upload

DATA = Path(__file__).parent / "data"
OFFICE = "office"
SETS = (
    ("facts", COLLECTION, DATA / "python_facts.jsonl"),
    ("facts, reworded", COLLECTION, DATA / "python_facts_reworded.jsonl"),
    ("office", OFFICE, DATA / "office_questions.jsonl"),
)
REFUSALS = ("The context does not answer", "I do not know", "I found nothing")
"""Beginnings of rill's refusals, with a context and without, and of the answer where nothing was found."""
MAX_TOKENS = 100
NUM_CLIENTS = 8
_TIMEOUT_S = 120.0
_TYPOGRAPHY = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "\xa0": " "})


@dataclass(frozen=True, slots=True)
class Question:
    """A question of a set. `answer` is a sentence of `document`; both are "" for an unanswerable question."""

    question: str
    document: str
    answer: str


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the server. `sources` are the passages it was generated from."""

    text: str
    sources: tuple[str, ...] = ()

    @property
    def is_refusal(self) -> bool:
        return self.text.startswith(REFUSALS)

    def is_exactly(self, answer: str) -> bool:
        return plain(self.text) == plain(answer)

    def has_source_of(self, answer: str) -> bool:
        """Whether a source contains the answer."""
        return any(plain(answer) in plain(text) for text in self.sources)


def plain(text: str) -> str:
    """Normalize typography, markup, line breaks and a final stop."""
    return " ".join(text.translate(_TYPOGRAPHY).replace("*", "").replace("`", "").split()).rstrip(".")


def read_questions(path: Path) -> list[Question]:
    """Read the questions of one file."""
    return [Question(**orjson.loads(line)) for line in path.read_bytes().splitlines()]


def measure(out: Path, report: ReportProgress) -> list[Figure]:
    """Measure the shares of exact answers and of refusals, with retrieval and without."""
    return uvloop.run(_measure(out.resolve(), report))


async def _measure(out: Path, report: ReportProgress) -> list[Figure]:
    async with python_corpus(out, report) as corpus:
        await _ingest_office(corpus.library)
    store = str(out / "rag" / "python.sqlite")
    with running_server(None, out / "rag" / "answers.log", "--rag-store", store) as server:
        limits = httpx.Limits(max_connections=NUM_CLIENTS)
        async with httpx.AsyncClient(base_url=server.url, timeout=_TIMEOUT_S, limits=limits) as client:
            figures = [figure for each in SETS for figure in await _measure_set(client, *each, report)]
    return figures


async def _ingest_office(library: DocumentLibrary) -> None:
    for path in sorted((DATA / "office").glob("*.md")):
        await library.put(OFFICE, Upload(path.name, path.read_bytes(), DocumentFormat.MARKDOWN))


async def _measure_set(
    client: httpx.AsyncClient, name: str, collection: str, path: Path, report: ReportProgress
) -> list[Figure]:
    questions = read_questions(path)
    replies = await asyncio.gather(*(_ask_with_retrieval(client, each, collection) for each in questions))
    closed_book = await asyncio.gather(*(_ask_closed_book(client, each) for each in questions))
    report(f"{name}: {len(questions)} questions asked")
    return figures_of(name, questions, replies, closed_book)


async def _ask_with_retrieval(client: httpx.AsyncClient, question: Question, collection: str) -> Reply:
    body = {"question": question.question, "stream": False, "max_tokens": MAX_TOKENS}
    answer = await _post(client, f"/v1/rag/{collection}/query", body)
    return Reply(answer["answer"].strip(), tuple(source["text"] for source in answer["sources"]))


async def _ask_closed_book(client: httpx.AsyncClient, question: Question) -> Reply:
    messages = [{"role": "user", "content": question.question}]
    body = {"model": "rill", "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
    answer = await _post(client, "/v1/chat/completions", body)
    return Reply(answer["choices"][0]["message"]["content"].strip())


async def _post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    if response.status_code != httpx.codes.OK:
        raise BenchmarkError(f"{path} answered {response.status_code}: {response.text[:300]}")
    answer: dict[str, Any] = response.json()
    return answer


def figures_of(
    name: str, questions: Sequence[Question], replies: Sequence[Reply], closed_book: Sequence[Reply]
) -> list[Figure]:
    """Compute the figures of one set. `replies` and `closed_book` are in the order of the questions."""
    pairs = list(zip(questions, replies, closed_book, strict=True))
    known = [pair for pair in pairs if pair[0].answer]
    unknown = [pair for pair in pairs if not pair[0].answer]
    shares = {
        "answer among the sources": [reply.has_source_of(question.answer) for question, reply, _ in known],
        "exact": [reply.is_exactly(question.answer) for question, reply, _ in known],
        "declined": [reply.is_refusal for _, reply, _ in known],
        "exact, no sources": [reply.is_exactly(question.answer) for question, _, reply in known],
        "declined, no sources": [reply.is_refusal for _, _, reply in known],
        "unanswerable, answered": [not reply.is_refusal for _, reply, _ in unknown],
    }
    return [
        Figure(f"{name}: {label}", f"{len(claims)} questions", "%", (100 * sum(claims) / len(claims),))
        for label, claims in shares.items()
        if claims
    ]
