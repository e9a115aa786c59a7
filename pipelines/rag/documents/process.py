"""Reading a document in a process of its own."""

import asyncio
import math
import signal
import sys
import tempfile
from typing import IO

import msgspec

from pipelines.rag.documents.extract import Extract
from pipelines.rag.documents.worker import Answer, Bounds, Read
from sluice.errors import ErrorCode, SluiceError, invalid

_WORKER = "pipelines.rag.documents.worker"
_PART_BYTES = 4 << 20
"""Written by one call of a thread: short, for whoever cancels waits for it."""
_WALL_PER_CPU = 4
"""How many times its processor time a process may take: machines are busy, and no wait is for ever."""
_START_S = 10.0


async def read_in_process(format: str, content: bytes, bounds: Bounds) -> Extract:
    """`readers.read` within bounds. The process has no file but its document and its answer, and ends with this call.

    Raises what the reader raises, TOO_LARGE beyond the bounds, INVALID (param "content") for what breaks its parser,
    UNAVAILABLE where the server has no room for its files.
    """
    try:
        with tempfile.TemporaryFile() as document, tempfile.TemporaryFile() as answer:
            await _write(document, content)
            code = await _run(format, document, answer, bounds)
            if code != 0:
                raise _fault(format, code, bounds)
            return _extract(await asyncio.to_thread(_decoded, answer))
    except OSError as error:  # no room for temporary files, or no more processes
        message = f"the server cannot read {format} documents now: {error}"
        raise SluiceError(ErrorCode.UNAVAILABLE, message) from error


async def _write(document: IO[bytes], content: bytes) -> None:
    view = memoryview(content)
    for start in range(0, len(content), _PART_BYTES):
        await asyncio.to_thread(document.write, view[start : start + _PART_BYTES])
    await asyncio.to_thread(document.seek, 0)


async def _run(format: str, document: IO[bytes], answer: IO[bytes], bounds: Bounds) -> int:
    """The exit code; negative for the signal that ended it."""
    limits = msgspec.json.encode(bounds).decode()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", _WORKER, format, limits),
        stdin=document,
        stdout=answer,
        start_new_session=True,  # Ctrl-C is for the server, which then cancels this call
    )
    try:
        async with asyncio.timeout(_START_S + _WALL_PER_CPU * bounds.cpu_s):
            return await process.wait()
    except TimeoutError:
        return -signal.SIGXCPU
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _decoded(answer: IO[bytes]) -> Answer:
    answer.seek(0)
    decoded: Answer = msgspec.msgpack.decode(answer.read(), type=Answer)
    return decoded


def _extract(answer: Answer) -> Extract:
    if isinstance(answer, Read):
        return answer.extract
    raise SluiceError(answer.code, answer.message, param=answer.param)


def _fault(format: str, code: int, bounds: Bounds) -> SluiceError:
    """Of a process that ended without an answer."""
    match -code:
        case signal.SIGXCPU:
            message = f"the {format} document takes more than {bounds.cpu_s} s of processor time to read"
            return SluiceError(ErrorCode.TOO_LARGE, message, param="content")
        case signal.SIGKILL:
            message = f"the {format} document takes more memory to read than there is"
            return SluiceError(ErrorCode.TOO_LARGE, message, param="content")
        case _:
            size = f"{bounds.memory_bytes >> 20} MiB"
            fault = f"it is broken, or needs more than {size} of memory (exit code {code})"
            return invalid("content", f"the {format} document cannot be read: {fault}")


def bounds_of(timeout_s: float, memory_bytes: int, max_chars: int) -> Bounds:
    """Processor time is limited in whole seconds."""
    return Bounds(max(1, math.ceil(timeout_s)), memory_bytes, max_chars)
