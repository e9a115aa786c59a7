"""`sluice rag list` and `delete` against a real server."""

import io
import json
import sys

import pytest

from sluice.cli import __main__
from sluice.pipelines.text.types import OWNER_KEY_HEADER
from tests.cli.rag.conftest import Sluice
from tests.gateway.api.rag.parts import RagServer


def test_list(rag: RagServer, sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    rag.add("docs", {"id": "a.md", "text": "# Refunds\n\nx"}, {"id": "b.txt", "text": "x"})
    rag.add("mine", {"id": "a.md", "text": "x"}, headers={OWNER_KEY_HEADER: "k"})
    assert sluice("list") == 0
    assert capsys.readouterr().out == (
        "docs: 2 documents, 2 chunks (encoder query_encoder, 32 dimensions)\n"
        "mine: 1 documents, 1 chunks (encoder query_encoder, 32 dimensions, has an owner)\n"
    )
    assert sluice("list", "--collection", "docs") == 0
    assert capsys.readouterr().out == "a.md  markdown, 1 chunks  Refunds\nb.txt  text, 1 chunks\n"
    assert sluice("list", "--collection", "docs", "--json") == 0
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == ["a.md", "b.txt"]
    assert sluice("list", "--collection", "nowhere") == 1


def test_list_follows_the_pages(
    rag: RagServer, sluice: Sluice, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.cli.rag.client._PAGE", 2)
    rag.add("docs", *({"id": f"{number}.txt", "text": "x"} for number in range(5)))
    assert sluice("list", "--collection", "docs") == 0
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_delete(rag: RagServer, sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    rag.add("docs", {"id": "a b/é.md", "text": "x"}, {"id": "b.txt", "text": "x"})
    assert sluice("delete", "a b/é.md") == 0
    assert rag.documents("docs").keys() == {"b.txt"}
    assert sluice("delete", "nowhere", "b.txt") == 1
    assert "sluice rag delete: error: collection 'docs' has no document 'nowhere'" in capsys.readouterr().err
    assert rag.documents("docs") == {}


def test_delete_asks(rag: RagServer, sluice: Sluice, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    rag.add("docs", {"id": "a.md", "text": "x"})
    assert sluice("delete", "--all") == 2
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    assert sluice("delete", "--all") == 1
    assert rag.documents("docs").keys() == {"a.md"}
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert sluice("delete", "--all") == 0
    rag.add("docs", {"id": "a.md", "text": "x"})
    assert sluice("delete", "--all", "--yes") == 0
    assert rag.ask("GET", "/collections").json()["data"] == []


@pytest.mark.parametrize("arguments", [["delete"], ["delete", "a", "--all"]])
def test_delete_wants_to_know_what(sluice: Sluice, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert sluice(*arguments) == 2
    assert "name documents, or give --all for the whole collection" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ingest", "query", "search", "list", "delete"])
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        __main__.main(["rag", command, "--help"])
    output = capsys.readouterr().out
    assert f"usage: sluice rag {command}" in output
    assert f"  sluice rag {command}" in output
    assert "Exit codes: 0" in output
    assert "SLUICE_COLLECTION_KEY" in output


def test_another_server_is_there(rag: RagServer, sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    assert sluice("list", "--url", f"{rag.url}/elsewhere") == 1
    assert capsys.readouterr().err.startswith("sluice rag list: error: ")
