"""The sandbox process: `python -m sluice.pipelines.rag.documents.sandbox_worker FORMAT LIMITS ENCODING` reads one.

The document comes on standard input and the result goes to standard output, both files. The process limits itself
before it reads a byte of the document, so that a malicious document takes down this process alone.
"""

import os
import re
import resource
import sys
from pathlib import Path

import msgspec

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.rag.documents.extract import UTF_8, Extract, decode_text, missing_package

_PARAGRAPH = re.compile(r"\n[^\S\n]*+\n\s*+")


def read_document(format: str, content: bytes, max_chars: int, encoding: str = "") -> Extract:
    """Extract text and structure from a document; `format` is the value of a `DocumentFormat`. Raises SluiceError.

    `encoding` is what the sender says that it is in, "" if nothing is said: a name that `find_encoding` returned.

    Blocks, so it runs in a thread or in the sandbox. Each parser is imported only where it is used: a process that
    lives for one document should not pay for the others.
    """
    try:
        extract = _parse(format, content, max_chars, encoding)
    except ModuleNotFoundError as error:
        raise missing_package(f"{format} documents", error) from None
    if not extract.text or extract.text.isspace():
        raise invalid("content", f"the {format} document has no text")
    return extract


def _parse(format: str, content: bytes, max_chars: int, encoding: str) -> Extract:
    match format:
        case "text":
            return read_text(content, encoding or UTF_8)
        case "markdown":
            from sluice.pipelines.rag.documents.markdown import read_markdown

            return read_markdown(content, encoding or UTF_8)
        case "html":
            from sluice.pipelines.rag.documents.html import read_html

            return read_html(content, encoding)
        case "pdf":
            from sluice.pipelines.rag.documents.pdf import read_pdf

            return read_pdf(content, max_chars)
    raise AssertionError(f"no reader for {format!r}")


def read_text(content: bytes, encoding: str = UTF_8) -> Extract:
    """Decode plain text. Blank lines separate paragraphs."""
    text = decode_text(content, encoding)
    return Extract(text, breaks=[match.end() for match in _PARAGRAPH.finditer(text) if match.end() < len(text)])


class SandboxLimits(msgspec.Struct, frozen=True):
    """Limits of a sandbox: processor time, memory beyond the interpreter's own, characters of the extracted text."""

    cpu_s: int
    memory_bytes: int
    max_chars: int


class ReadSuccess(msgspec.Struct, frozen=True, tag=True):
    extract: Extract


class ReadFailure(msgspec.Struct, frozen=True, tag=True):
    code: ErrorCode
    message: str
    param: str | None


ReadResult = ReadSuccess | ReadFailure


def main() -> None:
    format, limits_json, encoding = sys.argv[1:]
    limits = msgspec.json.decode(limits_json, type=SandboxLimits)
    _confine(limits)
    sys.stdout.buffer.write(msgspec.msgpack.encode(_read(format, limits, encoding)))


def _read(format: str, limits: SandboxLimits, encoding: str) -> ReadResult:
    try:
        return ReadSuccess(read_document(format, sys.stdin.buffer.read(), limits.max_chars, encoding))
    except SluiceError as error:
        return ReadFailure(error.code, error.message, error.param)
    except MemoryError:
        size = f"{limits.memory_bytes >> 20} MiB"
        message = f"the {format} document takes more than {size} of memory to read"
        return ReadFailure(ErrorCode.TOO_LARGE, message, "content")


def _confine(limits: SandboxLimits) -> None:
    # uvloop passes the server's inheritable file descriptors on.
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    memory_bytes = _virtual_bytes() + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _virtual_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return num_pages * resource.getpagesize()


if __name__ == "__main__":
    main()
