"""The files of a batch's results. A request is finished once its line is on the disk, in one of the two files."""

import asyncio
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from sluice.gateway.answers.batches.records import BatchUsage, ResultCounts
from sluice.gateway.front.long_work import breathe

T = TypeVar("T")

_MAX_OK = 299
_PIECE_BYTES = 1 << 20
_IDS_PER_PAUSE = 1000
_ID_PREFIX = "batch_req_"
_BEGINNING = b'{"id":"' + _ID_PREFIX.encode()
"""How every line begins."""


class BatchResult(msgspec.Struct):
    """One line of results, as OpenAI writes it: a response of any status, or an error where there is none."""

    id: str
    custom_id: str
    response: dict[str, Any] | None
    error: dict[str, str] | None

    @classmethod
    def answered(cls, custom_id: str, status: int, request_id: str, body: bytes) -> Self:
        response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
        return cls(_result_id(), custom_id, response, None)

    @classmethod
    def expired(cls, custom_id: str) -> Self:
        message = "This request could not be executed before the completion window expired."
        return cls(_result_id(), custom_id, None, {"code": "batch_expired", "message": message})

    @property
    def is_ok(self) -> bool:
        return self.response is not None and self.response["status_code"] <= _MAX_OK


class ResultFiles:
    """Writes the results of one batch: those of status 2xx to `output`, all others to `errors`.

    Lines that an earlier process wrote count; a last one that it had not finished is cut off. One thread does all that
    touches the disk, so that `close` comes after what was begun before it.
    """

    def __init__(self, output: Path, errors: Path) -> None:
        self.output = ResultFile(output)
        self.errors = ResultFile(errors)
        self.finished: set[str] = set()
        """Custom ids of the requests whose results are durable."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch-results")
        self._pending: list[BatchResult] = []
        self._writing = asyncio.Lock()
        self._failure: OSError | None = None

    async def open(self) -> None:
        """Open the files. Raises OSError, and ValueError for a file that has something else."""
        self.finished |= await self._run(lambda: self.output.open() | self.errors.open())

    @property
    def counts(self) -> ResultCounts:
        return ResultCounts(self.output.num_lines, self.errors.num_lines)

    async def add(self, *results: BatchResult) -> None:
        """Write results. They are durable when this returns; those that come meanwhile share one write to the disk.
        Raises OSError, and from then on for every result: open the files again to find out what they have."""
        self._pending += results
        async with self._writing:
            pending, self._pending = self._pending, []
            if pending and self._failure is None:  # else another call has written these too
                await self._run(lambda: self._write(pending))
            if self._failure is not None:
                raise self._failure

    def _write(self, results: Sequence[BatchResult]) -> None:
        try:
            self.output.append([each for each in results if each.is_ok])
            self.errors.append([each for each in results if not each.is_ok])
        except OSError as error:
            self._failure = error
        else:
            self.finished.update(each.custom_id for each in results)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        """Close the files, and delete those without a line."""
        await asyncio.shield(self._run(self._close))
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        self.output.close()
        self.errors.close()


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    """The token counts of chats and completions, or those of responses under their own names."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _TokenDetails | None = None
    completion_tokens_details: _TokenDetails | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _TokenDetails | None = None
    output_tokens_details: _TokenDetails | None = None

    def counted(self) -> BatchUsage:
        took = self.prompt_tokens_details or self.input_tokens_details or _TokenDetails()
        gave = self.completion_tokens_details or self.output_tokens_details or _TokenDetails()
        num_input = self.prompt_tokens or self.input_tokens
        num_output = self.completion_tokens or self.output_tokens
        return BatchUsage(num_input, took.cached_tokens or 0, num_output, gave.reasoning_tokens or 0)


class _AnswerHead(msgspec.Struct):
    usage: _Usage | None = None


class _ResponseHead(msgspec.Struct):
    body: msgspec.Raw


class _ResultHead(msgspec.Struct):
    custom_id: str
    response: _ResponseHead | None = None

    def usage(self) -> BatchUsage:
        """Return the answer's token counts; none where it has none that can be read."""
        if self.response is not None:
            with suppress(msgspec.MsgspecError):
                if (usage := _decode_answer(self.response.body).usage) is not None:
                    return usage.counted()
        return BatchUsage()


_decode_answer = msgspec.json.Decoder(_AnswerHead).decode
_decode_head = msgspec.json.Decoder(_ResultHead).decode


class ResultFile:
    """A file of results, a JSON object a line. For one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_lines = 0
        self.usage = BatchUsage()
        self._file = -1
        self._size = 0

    def open(self) -> set[str]:
        """Open the file, cut off a last line without its end, and return the custom ids of the others. Raises OSError,
        and ValueError for a line that is no result."""
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"another process writes {self.path}") from None
        ids = set()
        for line in self._lines():
            try:
                if not line.endswith(b"\n"):
                    _check_begun(line)
                    break
                head = _decode_head(line)
            except (ValueError, msgspec.MsgspecError):
                raise ValueError(f"line {self.num_lines + 1} of {self.path} is no result of a batch") from None
            ids.add(head.custom_id)
            self.num_lines += 1
            self.usage = self.usage.plus(head.usage())
            self._size += len(line)
            if self.num_lines % _IDS_PER_PAUSE == 0:
                breathe()
        os.ftruncate(self._file, self._size)
        return ids

    def _lines(self) -> Iterator[bytes]:
        with os.fdopen(os.dup(self._file), "rb", _PIECE_BYTES) as reader:
            yield from reader

    def append(self, results: Sequence[BatchResult]) -> None:
        """Add lines, which are on the disk when this returns. Raises OSError."""
        if not results:
            return
        lines = [msgspec.json.encode(each) for each in results]
        text = b"\n".join(lines) + b"\n"
        rest, at = memoryview(text), self._size
        while rest:
            num_written = os.pwrite(self._file, rest, at)
            rest, at = rest[num_written:], at + num_written
        os.fdatasync(self._file)
        self._size += len(text)
        self.num_lines += len(results)
        for line in lines:
            self.usage = self.usage.plus(_decode_head(line).usage())

    @property
    def num_bytes(self) -> int:
        return self._size

    def close(self) -> None:
        """Close the file, and delete it where it is empty. Idempotent."""
        if self._file < 0:
            return
        if not os.fstat(self._file).st_size:
            self.path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = -1


def _check_begun(line: bytes) -> None:
    """Raise ValueError where `line` is not the beginning of a result: nothing else may be cut off."""
    if not line.startswith(_BEGINNING[: len(line)]):
        raise ValueError(line)


def _result_id() -> str:
    return f"{_ID_PREFIX}{secrets.token_hex(12)}"
