"""`sluice rag query` and `search` against a real server."""

import json
from pathlib import Path

import pytest

from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.text.citations import Source
from sluice.pipelines.text.types import Retrieval, TextDetail, TextEvent
from tests.cli.rag.conftest import Sluice
from tests.gateway.api.rag.parts import RagServer

SOURCES = (
    Source(id=1, document="a.md", title="Handbook", heading="Refunds > When", start=5, end=40, score=1, text="x"),
    Source(id=2, document="c.md", title="Refunds", heading="Refunds > When", start=1, end=4, score=1, text="x"),
    Source(id=3, document="d.md", title="Cats", heading="Cats", start=1, end=4, score=1, text="x"),
    Source(id=4, document="b\x1b[31m.md", start=0, end=9, score=0.5, text="x"),
)
ANSWER = """30 days\u2028 [1]

Sources:
[1] Handbook > Refunds > When (a.md:5-40)
[2] Refunds > When (c.md:1-4)
[3] Cats (d.md:1-4)
[4] (b[31m.md:0-9)
"""


@pytest.fixture
def rag(rag: RagServer) -> RagServer:
    found = TextDetail(retrieval=Retrieval(SOURCES))
    rag.pipeline.events[:] = [
        TextEvent("", 0, 0, 0, detail=found),
        TextEvent("30 days\u2028", 1, 0, 0),
        TextEvent(" \x1b\x07[1]", 1, 0, 0),
        TextEvent("", 0, 9, 2, FinishReason.STOP, detail=found),
    ]
    return rag


@pytest.mark.parametrize("options", [[], ["--no-stream"]])
def test_an_answer(rag: RagServer, sluice: Sluice, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    """Nothing in the output moves the reader's cursor."""
    assert sluice("query", "how?", *options) == 0
    assert capsys.readouterr().out == ANSWER


def test_for_machines(rag: RagServer, sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    assert sluice("query", "how?", "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["finish_reason"], output["sources"][0]["document"]) == ("stop", "a.md")


def test_the_request_to_the_server(rag: RagServer, sluice: Sluice) -> None:
    options = ["--collection", "faq", "--top-k", "3", "--mode", "bm25", "--filter", '{"year": 2025}', "--key", "k"]
    assert sluice("query", "how?", *options, "--max-tokens", "5", "--temperature", "0") == 0
    [asked] = rag.pipeline.requests
    assert asked.parameters == {
        "collection": "faq", "top_k": 3, "mode": "bm25", "filter": '{"year":2025}', "collection_key": "k",
    }  # fmt: skip
    assert asked.sampling == {"max_tokens": 5, "temperature": 0}


def test_sluices_own_documentation_is_asked_until_there_are_others(
    rag: RagServer, sluice: Sluice, handbook: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for collection in ("sluice", "docs"):
        assert sluice("ingest", handbook, "--collection", collection) == 0
        capsys.readouterr()
        assert sluice("query", "how?") == 0
        assert rag.pipeline.requests[-1].parameters["collection"] == collection
        assert ("sluice rag ingest" in capsys.readouterr().err) is (collection == "sluice")


def test_nothing_was_found(rag: RagServer, sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    rag.pipeline.events[:] = [TextEvent("No idea.", 1, 0, 0), TextEvent("", 0, 9, 2, FinishReason.STOP)]
    assert sluice("query", "how?") == 0
    assert capsys.readouterr().out == "No idea.\n\nSources:\nnone: nothing in the collection fits the question\n"


@pytest.mark.parametrize("options", [[], ["--no-stream"], ["--json"]])
def test_a_refusal(rag: RagServer, sluice: Sluice, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    rag.pipeline.events[:] = [SluiceError(ErrorCode.UNAVAILABLE, "model 'retriever': store is down")]
    assert sluice("query", "how?", *options) == 1
    assert capsys.readouterr().err == "sluice rag query: error: model 'retriever': store is down\n"


def test_an_answer_that_fails_half_way(rag: RagServer, sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    rag.pipeline.events[2:] = [SluiceError(ErrorCode.INTERNAL, "model 'rill': gone")]
    assert sluice("query", "how?") == 1
    output = capsys.readouterr()
    assert (output.out, output.err) == ("30 days\u2028\n", "sluice rag query: error: model 'rill': gone\n")


def test_a_model_that_is_no_pipeline(rag: RagServer, sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    assert sluice("query", "how?", "--model", "plain_llm") == 1
    assert "those that do: rag_pipeline" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--filter", "{"], "argument --filter: must be a JSON object"),
        (["--filter", "[]"], "argument --filter: must be a JSON object, got '[]'"),
        (["--top-k", "0"], "argument --top-k: must be a whole number of at least 1, got '0'"),
        (["--mode", "words"], "argument --mode: invalid choice: 'words'"),
    ],
)
def test_bad_options(sluice: Sluice, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert sluice("query", "how?", *options) == 2
    assert message in capsys.readouterr().err


def test_search(rag: RagServer, sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    rag.add("docs", {"id": "a.md", "text": "# Refunds\n\nMoney comes back\nin 30 days."}, {"id": "b", "text": "cats"})
    assert sluice("search", "money comes back", "--top-k", "1") == 0
    place, passage = capsys.readouterr().out.splitlines()
    assert place.startswith("1. Refunds")
    assert "(a.md:" in place
    assert "Money comes back in 30 days." in passage
    assert sluice("search", "money comes back", "--top-k", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["data"][0]["document"] == "a.md"
    assert sluice("search", "x", "--collection", "nowhere") == 1
    assert capsys.readouterr().err.startswith("sluice rag search: error: ")
