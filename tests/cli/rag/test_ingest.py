"""`sluice rag ingest` against a real server."""

import asyncio
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sluice.cli import progress
from sluice.cli.rag import ingest
from sluice.cli.rag.ingest import IngestionProgress, RetryPolicy
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.options.access import AccessOptions
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.http import HttpOptions
from sluice.pipelines.text.types import OWNER_KEY_HEADER
from tests.cli.rag.conftest import Sluice
from tests.gateway.api.rag.parts import RagServer, rag_server, text_of
from tests.waiting import PATIENCE_S, until

ALL = {"refunds.md", "guides/cats.txt", "guides/deep/page.html"}


def test_a_folder(rag: RagServer, sluice: Sluice, handbook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sluice("ingest", handbook) == 0
    assert rag.documents("docs").keys() == ALL
    assert capsys.readouterr().out.startswith("docs: 3 created, 0 updated, 0 unchanged; 3 chunks in ")


def test_files_in_another_encoding_are_read_by_its_name_and_not_sent_again(
    rag: RagServer, sluice: Sluice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    assert sluice("ingest", tmp_path) == 1
    assert sluice("ingest", tmp_path, "--encoding", "latin1") == 0
    assert text_of(rag, "a.txt") == "café"
    capsys.readouterr()
    assert sluice("ingest", tmp_path, "--encoding", "windows-1252", "--dry-run") == 0
    assert capsys.readouterr().out.startswith("docs: 0 created, 0 updated, 1 unchanged")


def test_again_sends_nothing(
    rag: RagServer, sluice: Sluice, handbook: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sluice("ingest", handbook)
    capsys.readouterr()

    async def put(*_: Any, **__: Any) -> None:
        raise AssertionError("was sent")

    monkeypatch.setattr(rag.library, "put", put)
    assert sluice("ingest", handbook) == 0
    assert capsys.readouterr().out == "docs: 0 created, 0 updated, 3 unchanged\n"


def test_only_what_changed_is_sent(
    rag: RagServer, sluice: Sluice, handbook: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sluice("ingest", handbook)
    (handbook / "refunds.md").write_text("# Refunds\n\nNever.\n")
    (handbook / "new.md").write_text("new")
    (handbook / "guides" / "cats.txt").unlink()
    capsys.readouterr()
    assert sluice("ingest", handbook) == 0
    assert capsys.readouterr().out.startswith("docs: 1 created, 1 updated, 1 unchanged; 2 chunks")
    assert rag.documents("docs").keys() == ALL | {"new.md"}


def test_prune_deletes_what_is_gone(
    rag: RagServer, sluice: Sluice, handbook: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sluice("ingest", handbook)
    (handbook / "guides" / "cats.txt").unlink()
    capsys.readouterr()
    assert sluice("ingest", handbook, "--prune", "--dry-run") == 0
    dry = capsys.readouterr().out
    assert dry.startswith("would delete guides/cats.txt\n")
    assert dry.endswith("2 unchanged, 1 deleted (dry run: nothing was changed)\n")
    assert rag.documents("docs").keys() == ALL
    assert sluice("ingest", handbook, "--prune") == 0
    assert rag.documents("docs").keys() == ALL - {"guides/cats.txt"}


def test_prune_with_include_leaves_others_alone(rag: RagServer, sluice: Sluice, handbook: Path) -> None:
    sluice("ingest", handbook)
    (handbook / "guides" / "cats.txt").unlink()
    (handbook / "guides" / "deep" / "page.html").unlink()
    assert sluice("ingest", handbook, "--prune", "--include", "*.html", "--include", "*.md") == 0
    assert rag.documents("docs").keys() == {"refunds.md", "guides/cats.txt"}


def test_prune_deletes_nothing_for_an_empty_folder(
    rag: RagServer, sluice: Sluice, handbook: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sluice("ingest", handbook)
    (tmp_path / "empty").mkdir()
    assert sluice("ingest", tmp_path / "empty", "--prune") == 0
    assert "nothing was pruned, as there are no documents to keep" in capsys.readouterr().err
    assert rag.documents("docs").keys() == ALL


def test_dry_run(rag: RagServer, sluice: Sluice, handbook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sluice("ingest", handbook, "--dry-run") == 0
    *lines, summary = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"would create {document_id}" for document_id in ALL)
    assert summary == "docs: 3 created, 0 updated, 0 unchanged (dry run: nothing was changed)"
    assert rag.documents("docs") == {}


def test_force(rag: RagServer, sluice: Sluice, handbook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sluice("ingest", handbook)
    capsys.readouterr()
    assert sluice("ingest", handbook, "--force") == 0
    assert capsys.readouterr().out.startswith("docs: 0 created, 3 updated, 0 unchanged")


def test_included_files_are_taken_whatever_they_are(rag: RagServer, sluice: Sluice, handbook: Path) -> None:
    assert sluice("ingest", handbook, "--include", "*.py", "--include", "guides/*.txt") == 0
    assert rag.documents("docs").keys() == {"program.py", "guides/cats.txt"}


def test_a_file_by_itself(rag: RagServer, sluice: Sluice, handbook: Path) -> None:
    assert sluice("ingest", handbook / "program.py", handbook / "refunds.md", "--collection", "other") == 0
    assert rag.documents("other").keys() == {"program.py", "refunds.md"}


def test_lines(rag: RagServer, sluice: Sluice, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"id": "one", "text": "first", "title": "One"}, {"id": "two", "text": "second", "year": 2025}]
    (tmp_path / "faq.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert sluice("ingest", tmp_path) == 0
    assert rag.documents("docs").keys() == {"one", "two"}
    listed = rag.ask("GET", "/docs/documents").json()["data"]
    assert [(each["title"], each["metadata"]) for each in listed] == [("One", {}), ("two", {"year": 2025})]
    capsys.readouterr()
    assert sluice("ingest", tmp_path) == 0
    assert capsys.readouterr().out == "docs: 0 created, 0 updated, 2 unchanged\n"


def test_lines_of_one_id(rag: RagServer, sluice: Sluice, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first line is kept and sent once; the others are reported."""
    lines = [{"id": "one", "text": "first"}, {"id": "one", "text": "second"}]
    (tmp_path / "faq.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert sluice("ingest", tmp_path) == 1
    assert "failed: one: a document of this id came before it, and is kept" in capsys.readouterr().err
    assert rag.ask("GET", "/docs/documents/one").json()["text"] == "first"
    assert sluice("ingest", tmp_path) == 1
    assert capsys.readouterr().out == "docs: 0 created, 0 updated, 1 unchanged, 1 failed\n"


def test_a_bad_line_is_reported(
    rag: RagServer, sluice: Sluice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "faq.jsonl").write_text('{"id": "one", "text": "first"}\n{nonsense\n')
    rag.add("docs", {"id": "other", "text": "x"})
    assert sluice("ingest", tmp_path, "--prune") == 1
    output = capsys.readouterr()
    assert "failed: faq.jsonl: line 2 is not JSON" in output.err
    assert "nothing was pruned, as some files could not be read" in output.err
    assert rag.documents("docs").keys() == {"one", "other"}


def test_bad_files_do_not_hurt_the_others(
    rag: RagServer, sluice: Sluice, handbook: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (handbook / "broken.pdf").write_bytes(b"%PDF-1.7 and nothing more")
    (handbook / "empty.txt").write_bytes(b"")
    (handbook / os.fsdecode(b"bad\xff.md")).write_text("x")
    assert sluice("ingest", handbook) == 1
    output = capsys.readouterr()
    assert "failed: broken.pdf: " in output.err
    assert "failed: empty.txt: the document is empty" in output.err
    assert "its name has characters that no id can have" in output.err
    assert "Traceback" not in output.err
    assert output.out.startswith("docs: 3 created, 0 updated, 0 unchanged, 3 failed")
    assert rag.documents("docs").keys() == ALL


def test_links(rag: RagServer, sluice: Sluice, handbook: Path) -> None:
    (handbook / "again").symlink_to(handbook, target_is_directory=True)
    (handbook / "link.md").symlink_to(handbook / "refunds.md")
    (handbook / "dangling.md").symlink_to(handbook / "nowhere")
    os.mkfifo(handbook / "pipe.txt")
    assert sluice("ingest", handbook) == 0
    assert rag.documents("docs").keys() == ALL | {"link.md"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ingest"], "the following arguments are required: PATH"),
        (["ingest", "/nowhere"], "/nowhere is not there"),
        (["ingest", "/dev/null"], "/dev/null is neither a file nor a folder"),
        (["ingest", ".", "--jobs", "0"], "must be a whole number from 1 to 64, got '0'"),
        (["ingest", ".", "--colection", "x"], "unknown option --colection; did you mean --collection?"),
        (["ingest", ".", "--url", "ftp://x"], "--url must be the URL of a server, such as http://127.0.0.1:8000"),
        (["ingest", ".", "--key", "\n"], "--key must be printable ASCII text"),
        (["nothing"], "invalid choice: 'nothing'"),
        (["query", "caf\udce9"], "QUESTION: must be UTF-8 text, got 'caf\\udce9'"),
        (["delete", "caf\udce9"], "ID: must be UTF-8 text"),
        (["list", "--collection", "\udce9"], "--collection: must be UTF-8 text"),
        (["search", "x", "--filter", '{"a": NaN}'], "--filter: must be a JSON object: "),
        (["search", "x", "--filter", '{"a": "\\ud800"}'], "--filter: must be a JSON object: "),
        (["query", "x", "--temperature", "nan"], "--temperature: must be a number of at least 0, at most 2, got 'nan'"),
    ],
)
def test_what_is_no_command(
    rag: RagServer, sluice: Sluice, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert sluice(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_name_that_no_collection_can_have(
    rag: RagServer, sluice: Sluice, handbook: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is reported once, not for each file."""
    assert sluice("ingest", handbook, "--collection", "a b") == 1
    output = capsys.readouterr().err
    assert output.count("collection must be 1 to 63 letters") == 1
    assert "sluice rag ingest: error: collection must be" in output


def test_two_files_of_one_id(rag: RagServer, sluice: Sluice, handbook: Path, tmp_path: Path,
                             capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "refunds.md").write_text("x")
    assert sluice("ingest", handbook, tmp_path / "other") == 2
    assert "would both be the document 'refunds.md'; give the folder above both of them" in capsys.readouterr().err
    assert sluice("ingest", handbook, handbook / "refunds.md") == 0


def test_keys(rag: RagServer, sluice: Sluice, handbook: Path, monkeypatch: pytest.MonkeyPatch,
              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    assert sluice("ingest", handbook, "--key", "secret-1") == 0
    assert rag.ask("GET", "/docs/documents").status_code == 403
    assert rag.ask("GET", "/docs/documents", headers={OWNER_KEY_HEADER: "secret-1"}).status_code == 200
    assert sluice("ingest", handbook) == 1
    assert "collection 'docs' has an owner" in capsys.readouterr().err
    monkeypatch.setenv("SLUICE_COLLECTION_KEY", "secret-1")
    assert sluice("ingest", handbook) == 0


def test_asks_again_where_the_server_is_busy(
    rag: RagServer, sluice: Sluice, handbook: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, refusals = rag.library.put, iter([ErrorCode.OVERLOADED, ErrorCode.UNAVAILABLE])

    async def busy_at_first(*arguments: Any, **settings: Any) -> Any:
        if (code := next(refusals, None)) is not None:
            raise SluiceError(code, "not now", retry_after_s=60)
        return await put(*arguments, **settings)

    monkeypatch.setattr(rag.library, "put", busy_at_first)
    monkeypatch.setattr(ingest, "RetryPolicy", lambda: RetryPolicy(longest_wait_s=0))
    assert sluice("ingest", handbook) == 0
    assert rag.documents("docs").keys() == ALL


def test_stops_where_the_server_stays_busy(
    rag: RagServer,
    sluice: Sluice,
    handbook: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put, is_first = rag.library.put, iter([True])

    async def down_after_the_first(*arguments: Any, **settings: Any) -> Any:
        if not next(is_first, False):
            raise SluiceError(ErrorCode.UNAVAILABLE, "model 'sentence_encoder' is gone")
        return await put(*arguments, **settings)

    monkeypatch.setattr(rag.library, "put", down_after_the_first)
    monkeypatch.setattr(ingest, "RetryPolicy", lambda: RetryPolicy(waits_s=(0, 0)))
    assert sluice("ingest", handbook, "--jobs", "1") == 1
    output = capsys.readouterr()
    assert "error: model 'sentence_encoder' is gone" in output.err
    assert "stopped; the same command goes on from here" in output.err
    assert output.out.startswith("docs: 1 created")


def test_a_file_of_many_pieces(
    rag: RagServer, sluice: Sluice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = b"first" + b" " * (700 << 10) + b"last"
    (tmp_path / "long.txt").write_bytes(content)
    assert sluice("ingest", tmp_path) == 0
    assert rag.documents("docs") == {"long.txt": hashlib.sha256(content).hexdigest()}


def test_an_api_key(
    sluice: Sluice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("x")
    with rag_server(ServeConfig(access=AccessOptions(api_key="secret-2"))) as guarded:
        assert sluice("ingest", tmp_path, "--url", guarded.url) == 1
        assert "asks for an API key" in (output := capsys.readouterr().err)
        assert "set SLUICE_API_KEY" in output
        monkeypatch.setenv("SLUICE_API_KEY", "secret-2")
        assert sluice("ingest", tmp_path, "--url", guarded.url) == 0


def test_no_server(sluice: Sluice, handbook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sluice("ingest", handbook, "--url", "http://127.0.0.1:9") == 1
    output = capsys.readouterr()
    assert "no server listens at http://127.0.0.1:9; start one with: sluice serve" in output.err
    assert "the same command goes on from here" in output.err


def test_interrupted(
    rag: RagServer,
    sluice: Sluice,
    handbook: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C ends the command with a report, and the same command does the rest."""
    put_document, kills = rag.store.put_document, iter([False, True])

    async def kills_at_the_second(*arguments: Any) -> None:
        if next(kills, False):
            os.kill(process.pid, signal.SIGINT)
            # Answered meanwhile, the command might end before it sees the signal.
            await asyncio.to_thread(process.wait, PATIENCE_S)
        await put_document(*arguments)

    monkeypatch.setattr(rag.store, "put_document", kills_at_the_second)
    arguments = [sys.executable, "-m", "sluice.cli", "rag", "ingest", str(handbook), "--jobs", "1", "--url", rag.url]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "stopped; the same command goes on from here" in err
    assert out.startswith("docs: 1 created, 0 updated, 0 unchanged")
    assert sluice("ingest", handbook) == 0
    assert " 0 unchanged" not in capsys.readouterr().out
    assert rag.documents("docs").keys() == ALL


def test_a_file_that_is_too_long_for_the_server(
    sluice: Sluice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "long.txt").write_bytes(b"word " * (1 << 19))
    (tmp_path / "short.txt").write_bytes(b"word")
    with rag_server(ServeConfig(http=HttpOptions(max_input_bytes=4096))) as small:
        assert sluice("ingest", tmp_path, "--url", small.url) == 1
        assert small.documents("docs").keys() == {"short.txt"}
    [failed] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed: ")]
    assert failed.startswith("failed: long.txt: ")
    assert "--http-max-input-size" in failed


def test_lines_show_progress_where_there_is_no_terminal(
    rag: RagServer, sluice: Sluice, handbook: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0)
    assert sluice("ingest", handbook) == 0
    assert " of 3 documents, " in capsys.readouterr().err


async def test_a_terminal_has_a_bar() -> None:
    shown = io.StringIO()
    tally = IngestionProgress(num_planned=4)
    async with progress.show_progress(tally, Console(file=shown, force_terminal=True, width=100)):
        tally.count("created", 7)
        tally.fail("x", "bad")
        await until(
            lambda: re.search(r"2/4 documents, [\d,]+ chunks/s, 1 failed ETA", _without_colours(shown.getvalue()))
        )


def _without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
