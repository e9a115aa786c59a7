"""How often the bundled model quotes the right sentence, with the passages that the bundled pipeline finds and without.

Every question goes through a server as a client's would. Facts are from pages of Python's documentation that neither
model was trained on; half of the questions are worded as rill's training words them, those called reworded are not.
The offices' documents and the questions about them were written for this benchmark. A right answer is the sentence and
nothing else; another one that may answer as well counts as wrong. Nothing found answers the questions called
unanswerable: there only a refusal is right.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson
import uvloop

from benchmarks.figures import BenchmarkError, Figure
from benchmarks.rag.corpus import COLLECTION, python_corpus
from benchmarks.server import running_server
from pipelines.rag.library import Library, Upload
from pipelines.rag.types import DocumentFormat

DATA = Path(__file__).parent / "data"
OFFICE = "office"
SETS = (
    ("facts", COLLECTION, DATA / "python_facts.jsonl"),
    ("facts, reworded", COLLECTION, DATA / "python_facts_reworded.jsonl"),
    ("office", OFFICE, DATA / "office_questions.jsonl"),
)
REFUSALS = ("The context does not answer", "I do not know")
"""How rill declines, with a context and without."""
MAX_TOKENS = 100
NUM_CLIENTS = 8
_REQUEST_TIMEOUT_S = 120.0
_TYPOGRAPHY = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "\xa0": " "})


@dataclass(frozen=True, slots=True)
class Question:
    """`answer` is a sentence of `document`; both are "" where there is none."""

    question: str
    document: str
    answer: str


@dataclass(frozen=True, slots=True)
class Reply:
    """`sources` are the texts that it was made from."""

    text: str
    sources: tuple[str, ...] = ()

    @property
    def is_refusal(self) -> bool:
        return self.text.startswith(REFUSALS)

    def is_exactly(self, answer: str) -> bool:
        return plain(self.text) == plain(answer)

    def could_be(self, answer: str) -> bool:
        """Whether a source has the answer."""
        return any(plain(answer) in plain(text) for text in self.sources)


Ask = Callable[[httpx.AsyncClient, str, str], "asyncio.Future[Reply]"]


def plain(text: str) -> str:
    """What typography, markup, line breaks and a final stop do not change."""
    return " ".join(text.translate(_TYPOGRAPHY).replace("*", "").replace("`", "").split()).rstrip(".")


def read_questions(path: Path) -> list[Question]:
    """All of one file."""
    return [Question(**orjson.loads(line)) for line in path.read_bytes().splitlines()]


def measure(out: Path, say: Callable[[str], None]) -> list[Figure]:
    """Shares of answers that are exact, refused and neither, with retrieval and without."""
    return uvloop.run(_measure(out.resolve(), say))


async def _measure(out: Path, say: Callable[[str], None]) -> list[Figure]:
    async with python_corpus(out, say) as corpus:
        await _put_office(corpus.library)
    store = str(out / "rag" / "python.sqlite")
    figures: list[Figure] = []
    with running_server(None, out / "rag" / "answers.log", "--rag-store", store) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=_REQUEST_TIMEOUT_S) as client:
            for name, collection, path in SETS:
                questions = read_questions(path)
                replies = await _in_turns([_with_sources(client, each, collection) for each in questions])
                closed_book = await _in_turns([_closed_book(client, each) for each in questions])
                figures += _figures(name, questions, replies, closed_book)
                say(f"{len(questions)} questions of {name} asked")
    return figures


async def _put_office(library: Library) -> None:
    for path in sorted((DATA / "office").glob("*.md")):
        await library.put(OFFICE, Upload(path.name, path.read_bytes(), DocumentFormat.MARKDOWN))
