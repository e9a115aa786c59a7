"""How well retrieval finds the passage that answers: 332 questions about Python whose passage is known.

The questions were written for this benchmark from the passages, in other words than theirs where that was natural, and
no training saw them. A chunk is right when it comes from the question's page and holds the beginning of its passage;
other passages that would answer too count as wrong, for every mode alike.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import uvloop
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from benchmarks.figures import Figure, Target
from benchmarks.rag.corpus import COLLECTION, Corpus, python_corpus
from gateway.bundled import models_folder
from pipelines.rag.retrieval.search import SearchOptions, SearchQuery
from pipelines.rag.retriever import parse_settings
from pipelines.rag.types import Hit, RetrievalMode

QUESTIONS = Path(__file__).parent / "data" / "python_questions.jsonl"
DEPTH = 10
"""Places that count for the mean reciprocal rank."""


@dataclass(frozen=True, slots=True)
class Question:
    """`quote` begins the passage that answers, on `page`."""

    question: str
    page: str
    quote: str

    def is_answered_by(self, hit: Hit) -> bool:
        """Whether the hit is of the passage."""
        return hit.document_id == self.page and _plain(self.quote) in _plain(hit.text)


def questions() -> list[Question]:
    """All of them."""
    return [Question(**orjson.loads(line)) for line in QUESTIONS.read_bytes().splitlines()]


def measure(out: Path, say: Callable[[str], None]) -> list[Figure]:
    """Recall at 5 and mean reciprocal rank of each mode, and how fast the corpus was read."""
    return uvloop.run(_measure(out.resolve(), say))


async def _measure(out: Path, say: Callable[[str], None]) -> list[Figure]:
    figures: list[Figure] = []
    async with python_corpus(out, say) as corpus:
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
    """How the bundled retriever searches."""
    text = (models_folder() / "retriever" / "config.pbtxt").read_text()
    return parse_settings(text_format.Parse(text, ModelConfig())).options


def _with_target(figure: Figure, best: float) -> Figure:
    is_hybrid = figure.name == "recall@5" and figure.subject == RetrievalMode.HYBRID
    return replace(figure, target=Target(round(best, 2), is_ceiling=False)) if is_hybrid else figure


async def ranks_of(corpus: Corpus, options: SearchOptions) -> list[int | None]:
    """At which place, from 1, the right chunk stands for each question; None where it was not found."""
    ranks: list[int | None] = []
    for question in questions():
        hits = await corpus.library.search(COLLECTION, SearchQuery(question.question, None), options)
        right = [place for place, hit in enumerate(hits, 1) if question.is_answered_by(hit)]
        ranks.append(right[0] if right else None)
    return ranks


def recall_at(ranks: Sequence[int | None], depth: int) -> float:
    """The share of questions whose chunk is among the first `depth`."""
    return sum(rank is not None and rank <= depth for rank in ranks) / len(ranks)


def mean_reciprocal_rank(ranks: Sequence[int | None]) -> float:
    """1 where the right chunk is always first, 0 where it is never found."""
    return sum(0.0 if rank is None else 1 / rank for rank in ranks) / len(ranks)


def _plain(text: str) -> str:
    """What markup and typography do not change."""
    return re.sub(r"[^a-z0-9]+", "", text.lower())
