"""The quality of retrieval: the rank of the passage that answers, for 332 questions about Python.

The questions were written for this benchmark from the passages, in other words where that was natural. No model was
trained on them. A chunk is right where it comes from the question's page and holds the beginning of its passage. Other
passages that would answer as well count as wrong, in every mode alike.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import uvloop
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from benchmarks.figures import Figure, ReportProgress, Target
from benchmarks.rag.corpus import COLLECTION, Corpus, python_corpus
from sluice.bundled import models_folder
from sluice.pipelines.rag.retriever import parse_settings
from sluice.pipelines.rag.search import SearchOptions, SearchQuery
from sluice.pipelines.rag.types import Hit, RetrievalMode

QUESTIONS = Path(__file__).parent / "data" / "python_questions.jsonl"
DEPTH = 10
"""Number of ranks that count for the mean reciprocal rank."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question. `quote` is the beginning of the passage on `page` that answers it."""

    question: str
    page: str
    quote: str

    def is_answered_by(self, hit: Hit) -> bool:
        """Whether the hit contains the beginning of the passage."""
        return hit.document_id == self.page and _plain(self.quote) in _plain(hit.text)


def questions() -> list[Question]:
    """Read all questions."""
    return [Question(**orjson.loads(line)) for line in QUESTIONS.read_bytes().splitlines()]


def measure(out: Path, report: ReportProgress) -> list[Figure]:
    """Measure recall at 5 and mean reciprocal rank of each mode, and the speed of ingestion."""
    return uvloop.run(_measure(out.resolve(), report))


async def _measure(out: Path, report: ReportProgress) -> list[Figure]:
    figures: list[Figure] = []
    async with python_corpus(out, report) as corpus:
        if corpus.num_documents:
            rate = corpus.num_chunks / corpus.seconds
            figures.append(Figure("ingestion", f"{corpus.num_chunks} chunks", "chunks/s", (rate,)))
        recalls = {}
        for mode in RetrievalMode:
            ranks = await ranks_of(corpus, replace(bundled_options(), mode=mode, top_k=DEPTH))
            recalls[mode] = recall_at(ranks, 5)
            figures.append(Figure("recall@5", mode, "%", (100 * recalls[mode],)))
            figures.append(Figure(f"MRR@{DEPTH}", mode, "", (mean_reciprocal_rank(ranks),)))
    best = 100 * max(recalls[RetrievalMode.VECTOR], recalls[RetrievalMode.BM25])
    return [_with_target(figure, best) for figure in figures]


def bundled_options() -> SearchOptions:
    """Return the search options of the bundled retriever."""
    text = (models_folder() / "retriever" / "config.pbtxt").read_text()
    return parse_settings(text_format.Parse(text, ModelConfig())).options


def _with_target(figure: Figure, best: float) -> Figure:
    is_hybrid = figure.name == "recall@5" and figure.subject == RetrievalMode.HYBRID
    return replace(figure, target=Target(round(best, 2), is_ceiling=False)) if is_hybrid else figure


async def ranks_of(corpus: Corpus, options: SearchOptions) -> list[int | None]:
    """Return the rank of the right chunk for each question, from 1; None where it is not found."""
    ranks: list[int | None] = []
    for question in questions():
        hits = await corpus.library.search(COLLECTION, SearchQuery(question.question, None), options)
        right = [place for place, hit in enumerate(hits, 1) if question.is_answered_by(hit)]
        ranks.append(right[0] if right else None)
    return ranks


def recall_at(ranks: Sequence[int | None], depth: int) -> float:
    """Return the share of questions whose chunk is among the first `depth`."""
    return sum(rank is not None and rank <= depth for rank in ranks) / len(ranks)


def mean_reciprocal_rank(ranks: Sequence[int | None]) -> float:
    """Return the mean reciprocal rank: 1 where the right chunk is always first, 0 where it is never found."""
    return sum(0.0 if rank is None else 1 / rank for rank in ranks) / len(ranks)


def _plain(text: str) -> str:
    """Keep only letters and digits, which markup and typography do not change."""
    return re.sub(r"[^a-z0-9]+", "", text.lower())
