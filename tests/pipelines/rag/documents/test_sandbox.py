"""Documents that are read in a sandbox process, and its failures."""

import asyncio
import socket
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.documents import parse as parsing
from sluice.pipelines.rag.documents.parse import ParseLimits, parse_document
from sluice.pipelines.rag.documents.sandbox_worker import read_document
from sluice.pipelines.rag.types import DocumentFormat, ParsedDocument
from tests.pipelines.rag.documents.pdf_writer import Pdf
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow

LIMITS = ParseLimits()
SLOW_PDF = Pdf([["A page of text that is read again and again."] * 40], extra_kids=200_000).to_bytes()
"""A small file that takes minutes: its one page stands in its tree of pages two hundred thousand times."""


async def parse(content: bytes, format: DocumentFormat, limits: ParseLimits = LIMITS) -> ParsedDocument:
    return await parse_document(content, format, limits)


async def fault_of(content: bytes, format: DocumentFormat, limits: ParseLimits = LIMITS) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        await parse(content, format, limits)
    assert caught.value.param == "content"
    return caught.value


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "documents.sandbox_worker" in " ".join(child.cmdline())]


@asynccontextmanager
async def parsing_slowly() -> AsyncGenerator[tuple[asyncio.Task[ParsedDocument], psutil.Process], None]:
    task = asyncio.create_task(parse(SLOW_PDF, DocumentFormat.PDF))
    try:
        await until(workers)
        yield task, workers()[0]
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_pdf_is_read() -> None:
    document = await parse(Pdf([["Hello."], ["World."]], title="A book").to_bytes(), DocumentFormat.PDF)
    assert document.text == "Hello.\n\nWorld."
    assert document.title == "A book"
    assert [heading.text for heading in document.headings] == ["Page 1", "Page 2"]
    assert list(document.breaks) == [0, 8]


async def test_what_the_reader_refuses_is_refused_with_its_words() -> None:
    error = await fault_of(Pdf([[]]).to_bytes(), DocumentFormat.PDF)
    assert (error.code, "no text layer" in error.message) == (ErrorCode.INVALID, True)


async def test_no_room_for_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(SluiceError, match=r"the server cannot read pdf documents now: .* No such file") as caught:
        await parse(Pdf([["Hello."]]).to_bytes(), DocumentFormat.PDF, LIMITS)
    assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_cancelling_ends_the_process() -> None:
    async with parsing_slowly() as (task, worker):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not worker.is_running()


async def test_a_parser_that_dies_takes_down_its_process_alone() -> None:
    async with parsing_slowly() as (task, worker):
        worker.send_signal(11)
        with pytest.raises(SluiceError) as caught:
            await task
        assert caught.value.code is ErrorCode.INVALID
        assert "cannot be read" in caught.value.message
    assert (await parse(Pdf([["Next."]]).to_bytes(), DocumentFormat.PDF)).text == "Next."


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_the_process_inherits_no_socket_and_no_file(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def check() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.set_inheritable(True)
            async with parsing_slowly() as (_, worker):
                await until(lambda: worker.cpu_times().user > 0.4)  # it has begun to read
                assert worker.net_connections() == []
                assert worker.num_fds() <= 3

    run(check())


async def test_more_processor_time_than_the_limit_ends_the_process_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "_START_S", 1e6)  # the clock on the wall never ends it
    error = await fault_of(SLOW_PDF, DocumentFormat.PDF, ParseLimits(timeout_s=1.0))
    assert error.code is ErrorCode.TOO_LARGE
    assert "1 s of processor time" in error.message


@pytest.mark.parametrize("format", [DocumentFormat.PDF, DocumentFormat.HTML])
async def test_more_memory_than_the_limit_is_refused(format: DocumentFormat) -> None:
    is_pdf = format is DocumentFormat.PDF
    content = Pdf([["text"]], padding_bytes=48 << 20).to_bytes() if is_pdf else b"<p>a</p>" * (6 << 20)
    error = await fault_of(content, format, ParseLimits(memory_bytes=32 << 20))
    assert error.code is ErrorCode.TOO_LARGE
    assert "32 MiB of memory" in error.message


async def test_a_large_pdf_is_refused_unread_or_read_within_the_memory_limit() -> None:
    content = Pdf([["Small text."]], padding_bytes=200 << 20).to_bytes()
    error = await fault_of(content, DocumentFormat.PDF)
    assert error.code is ErrorCode.TOO_LARGE
    document = await parse(content, DocumentFormat.PDF, ParseLimits(max_bytes=256 << 20))
    assert document.text == "Small text."


@pytest.mark.parametrize(
    ("format", "num_bytes"), [(DocumentFormat.HTML, 16 << 10), (DocumentFormat.MARKDOWN, 256 << 10)]
)
async def test_what_takes_long_to_read_is_not_read_in_the_server(
    format: DocumentFormat, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("it keeps the interpreter's lock")

    monkeypatch.setattr(parsing, "read_document", refuse)
    assert (await parse(b"Text." + b"\n" * num_bytes, format)).text.strip() == "Text."


@pytest.mark.parametrize("format", [DocumentFormat.HTML, DocumentFormat.MARKDOWN, DocumentFormat.TEXT])
async def test_the_event_loop_goes_on_while_a_document_is_read(
    format: DocumentFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_gone_on = threading.Event()

    def read_then(*arguments: Any) -> Any:
        assert has_gone_on.wait(PATIENCE_S)
        return read_document(*arguments)

    monkeypatch.setattr(parsing, "read_document", read_then)
    task = asyncio.create_task(parse(b"Text.", format))
    await asyncio.sleep(0)
    has_gone_on.set()
    assert (await task).text == "Text."


async def test_deep_html_ends_within_the_limit() -> None:
    error = await fault_of(b"<div>" * 2_000_000 + b"deep", DocumentFormat.HTML, ParseLimits(timeout_s=1.0))
    assert error.code is ErrorCode.TOO_LARGE


@pytest.mark.parametrize("format", [DocumentFormat.HTML, DocumentFormat.MARKDOWN])
async def test_a_large_document_is_read_in_the_encoding_that_the_sender_names(format: DocumentFormat) -> None:
    content = b"<p>caf\xe9 \x93x\x94</p>\n\n" * 20_000
    assert (await parse_document(content, format, LIMITS, "windows-1252")).text.startswith("café “x”")


async def test_large_documents_of_all_formats_are_read_as_small_ones_are() -> None:
    for format in (DocumentFormat.HTML, DocumentFormat.MARKDOWN):
        block = "<h2>H</h2><p>Text.</p>" if format is DocumentFormat.HTML else "## H\n\nText.\n\n"
        small, large = [await parse((block * n).encode(), format) for n in (1, 20_000)]
        assert large.text.startswith(small.text.rstrip())
        assert len(large.headings) == 20_000 * len(small.headings)
