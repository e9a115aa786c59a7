"""The process that reads one document: `python -m pipelines.rag.documents.worker FORMAT LIMITS`.

The document comes on standard input and the answer goes to standard output, both files. Limits are set before a byte
of the document is looked at: what goes wrong takes down this process alone.
"""

import os
import resource
import sys
from pathlib import Path

import msgspec

from pipelines.rag.documents.extract import Extract
from pipelines.rag.documents.readers import read
from sluice.errors import ErrorCode, SluiceError


class Bounds(msgspec.Struct, frozen=True):
    """Of processor time, of memory beyond what the interpreter has, of the text that comes out."""

    cpu_s: int
    memory_bytes: int
    max_chars: int


class Read(msgspec.Struct, frozen=True, tag=True):
    extract: Extract


class Refused(msgspec.Struct, frozen=True, tag=True):
    code: ErrorCode
    message: str
    param: str | None


Answer = Read | Refused


def main() -> None:
    format, given = sys.argv[1:]
    bounds = msgspec.json.decode(given, type=Bounds)
    _confine(bounds)
    sys.stdout.buffer.write(msgspec.msgpack.encode(_answer(format, bounds)))


def _answer(format: str, bounds: Bounds) -> Answer:
    try:
        return Read(read(format, sys.stdin.buffer.read(), bounds.max_chars))
    except SluiceError as error:
        return Refused(error.code, error.message, error.param)
    except MemoryError:
        size = f"{bounds.memory_bytes >> 20} MiB"
        return Refused(
            ErrorCode.TOO_LARGE, f"the {format} document takes more than {size} of memory to read", "content"
        )


def _confine(bounds: Bounds) -> None:
    # uvloop leaves a process what the server's has that is inheritable.
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (bounds.cpu_s, bounds.cpu_s + 1))
    memory_bytes = _virtual_bytes() + bounds.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _virtual_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return num_pages * resource.getpagesize()


if __name__ == "__main__":
    main()
