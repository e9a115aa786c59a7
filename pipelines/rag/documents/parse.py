"""Detects a document's format, and parses its bytes into text and structure, in a thread or in a sandbox.

The sandbox is a process with limits on memory and processor time that lives for one document.
"""

import asyncio
import codecs
import math
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO

import msgspec

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.rag.documents.extract import UTF_8, Extract, decode_text
from sluice.pipelines.rag.documents.sandbox_worker import ReadFailure, ReadResult, SandboxLimits, read_document
from sluice.pipelines.rag.types import DocumentFormat, Heading, ParsedDocument

_ACCEPTED = "text (UTF-8, or UTF-16 with a byte order mark), Markdown, HTML, PDF"
_PDF_MARK = b"%PDF-"
_PDF_MARK_WITHIN = 1024
"""Readers accept a PDF whose mark stands anywhere in this many first bytes."""
_PDF_HEADER = re.compile(rb"^%PDF-\d\.\d\s*$", re.MULTILINE)
_PDF_TRAILER, _PDF_TRAILER_WITHIN = b"%%EOF", 1024

_TYPES = {
    "application/pdf": DocumentFormat.PDF,
    "application/x-pdf": DocumentFormat.PDF,
    "application/xhtml+xml": DocumentFormat.HTML,
    "text/html": DocumentFormat.HTML,
    "text/markdown": DocumentFormat.MARKDOWN,
    "text/x-markdown": DocumentFormat.MARKDOWN,
}
_SUFFIXES = {
    ".htm": DocumentFormat.HTML,
    ".html": DocumentFormat.HTML,
    ".markdown": DocumentFormat.MARKDOWN,
    ".md": DocumentFormat.MARKDOWN,
    ".pdf": DocumentFormat.PDF,
    ".rst": DocumentFormat.TEXT,
    ".txt": DocumentFormat.TEXT,
    ".xhtml": DocumentFormat.HTML,
}
_HTML_START = re.compile(rb"\s*(?:<!doctype\s+html|<html[\s>])", re.IGNORECASE)
_MAX_THREAD_BYTES = {DocumentFormat.MARKDOWN: 256 << 10, DocumentFormat.HTML: 16 << 10, DocumentFormat.PDF: 0}
"""Largest document of each format that a thread reads, which saves 0.1 s for the start of a process.

A thread can be neither killed nor limited, and shares the interpreter's lock. Markdown's parser is Python; HTML of a
few hundred kilobytes can expand to gigabytes of elements, and takes time quadratic in its depth. Plain text of any size
is read in a thread: one regular expression splits it.
"""


def detect_format(content_type: str, filename: str, content: bytes, encoding: str = "") -> DocumentFormat:
    """Detect the format by the content type, the file name, or else the bytes themselves.

    text/plain and application/octet-stream are ignored: clients send them for files whose type they do not know. A PDF
    is known by its bytes whatever it is called, unless it could be the text that it is called. `encoding` is the
    charset that came with the content type, "" for none. Raises SluiceError INVALID (param "format"), which names what
    came and what is accepted, for any other format.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    called = _TYPES.get(media_type) or _SUFFIXES.get(PurePosixPath(filename).suffix.lower())
    is_called_text = called is not None or media_type.startswith("text/") or bool(encoding)
    if called is not DocumentFormat.PDF and _is_pdf(content, encoding or UTF_8, is_called_text):
        return DocumentFormat.PDF
    return called or _detect_by_bytes(media_type, filename, content, encoding or UTF_8)


def _is_pdf(content: bytes, encoding: str, is_called_text: bool) -> bool:
    """Whether the bytes are a PDF: they have its mark, and are not text that speaks of PDFs.

    The mark begins what is called text, and may come after other bytes in what is not called anything.
    """
    head = content[:_PDF_MARK_WITHIN]
    if not (head.lstrip().startswith(_PDF_MARK) if is_called_text else _PDF_MARK in head):
        return False
    if not _is_text(content, encoding):
        return is_called_text or not _HTML_START.match(content)
    is_whole = _PDF_HEADER.search(head) is not None and _PDF_TRAILER in content[-_PDF_TRAILER_WITHIN:]
    return is_whole and not is_called_text


def _is_text(content: bytes, encoding: str) -> bool:
    try:
        decode_text(content, encoding)
    except SluiceError:
        return False
    return True


def _detect_by_bytes(media_type: str, filename: str, content: bytes, encoding: str) -> DocumentFormat:
    """Tell HTML from plain text, for content whose type and name do not say."""
    if _HTML_START.match(content.removeprefix(codecs.BOM_UTF8)):
        return DocumentFormat.HTML
    try:
        decode_text(content, encoding)
    except SluiceError as error:
        given = ", ".join(part for part in (media_type, repr(filename[:120]) if filename else "") if part)
        given = given or "a document without content type and file name"
        raise invalid("format", f"{given} is of no format that is taken ({_ACCEPTED}): {error.message}") from None
    return DocumentFormat.TEXT


@dataclass(frozen=True, slots=True)
class ParseLimits:
    """Limits for parsing one document.

    `max_bytes` bounds the document, and the characters of its text. `timeout_s` of processor time and `memory_bytes`
    of memory bound the sandbox process, which small documents other than PDFs do not need.
    """

    max_bytes: int = 64 << 20
    timeout_s: float = 60.0
    memory_bytes: int = 1 << 30


async def parse_document(
    content: bytes, format: DocumentFormat, limits: ParseLimits, encoding: str = ""
) -> ParsedDocument:
    """Parse a document without blocking the event loop. PDFs and large documents are parsed in a sandbox process.

    `encoding` is what the sender says that it is in, as in `Upload`.
    Raises SluiceError INVALID (param "content") for a document that cannot be read or has no text, and TOO_LARGE for
    one beyond the limits.
    """
    if len(content) > limits.max_bytes:
        message = f"the document has {len(content)} bytes, and at most {limits.max_bytes} are taken"
        raise SluiceError(ErrorCode.TOO_LARGE, message, param="content")
    if not content:
        raise invalid("content", "the document is empty")
    if len(content) <= _MAX_THREAD_BYTES.get(format, limits.max_bytes):
        extract = await asyncio.to_thread(read_document, format.value, content, limits.max_bytes, encoding)
    else:
        # The kernel limits processor time in whole seconds.
        cpu_s = max(1, math.ceil(limits.timeout_s))
        sandbox_limits = SandboxLimits(cpu_s, limits.memory_bytes, limits.max_bytes)
        extract = await read_in_sandbox(format.value, content, sandbox_limits, encoding)
    headings = tuple(Heading(*heading) for heading in extract.headings)
    return ParsedDocument(extract.text, extract.title, headings, extract.breaks)


_WORKER = "sluice.pipelines.rag.documents.sandbox_worker"
_PART_BYTES = 4 << 20
"""Bytes that one call in a thread writes. A cancelled caller waits for the call, so it has to be short."""
_WALL_PER_CPU = 4
"""Wall-clock seconds allowed for each second of the limit on processor time, for machines that are busy."""
_START_S = 10.0
"""Wall-clock seconds allowed for the start of the process."""


async def read_in_sandbox(format: str, content: bytes, limits: SandboxLimits, encoding: str = "") -> Extract:
    """Run `readers.read_document` in a sandbox process, which has no open files but its input and its output.

    Raises what the reader raises, TOO_LARGE beyond the limits, INVALID (param "content") for a document that crashes
    the parser, and UNAVAILABLE if the server has no room for the files.
    """
    try:
        with tempfile.TemporaryFile() as document, tempfile.TemporaryFile() as output:
            await _write(document, content)
            arguments = format, msgspec.json.encode(limits).decode(), encoding
            exit_code = await _run(arguments, document, output, limits.cpu_s)
            if exit_code != 0:
                raise _crash_error(format, exit_code, limits)
            result = await asyncio.to_thread(_decode_result, output)
    except OSError as error:  # no room for temporary files, or no more processes
        message = f"the server cannot read {format} documents now: {error}"
        raise SluiceError(ErrorCode.UNAVAILABLE, message) from error
    if isinstance(result, ReadFailure):
        raise SluiceError(result.code, result.message, param=result.param)
    return result.extract


async def _write(document: IO[bytes], content: bytes) -> None:
    view = memoryview(content)
    for start in range(0, len(content), _PART_BYTES):
        await asyncio.to_thread(document.write, view[start : start + _PART_BYTES])
    await asyncio.to_thread(document.seek, 0)


async def _run(arguments: Sequence[str], document: IO[bytes], output: IO[bytes], cpu_s: int) -> int:
    """Run the sandbox process and return its exit code, negative for the signal that ended it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", _WORKER, *arguments),
        stdin=document,
        stdout=output,
        start_new_session=True,  # Ctrl-C is for the server, which then cancels this call
    )
    try:
        async with asyncio.timeout(_START_S + _WALL_PER_CPU * cpu_s):
            return await process.wait()
    except TimeoutError:
        return -signal.SIGXCPU
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _decode_result(output: IO[bytes]) -> ReadResult:
    output.seek(0)
    result: ReadResult = msgspec.msgpack.decode(output.read(), type=ReadResult)
    return result


def _crash_error(format: str, exit_code: int, limits: SandboxLimits) -> SluiceError:
    """Return the error for a process that ended without a result."""
    match -exit_code:
        case signal.SIGXCPU:
            message = f"the {format} document takes more than {limits.cpu_s} s of processor time to read"
            return SluiceError(ErrorCode.TOO_LARGE, message, param="content")
        case signal.SIGKILL:
            message = f"the {format} document takes more memory to read than there is"
            return SluiceError(ErrorCode.TOO_LARGE, message, param="content")
        case _:
            size = f"{limits.memory_bytes >> 20} MiB"
            fault = f"it is broken, or needs more than {size} of memory (exit code {exit_code})"
            return invalid("content", f"the {format} document cannot be read: {fault}")
