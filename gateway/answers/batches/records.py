"""Files and batches as they are stored, and as OpenAI's clients see them."""

import re
import secrets
from enum import StrEnum
from typing import Any, Literal

import msgspec

from sluice.gateway.tenancy.access.identity import Identity

PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
"""Purposes of files that clients upload."""
BATCH_PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"
JsonObject = dict[str, Any]
MAX_FILENAME_CHARS = 255
_NO_NAMES = ("", ".", "..")


def base_name(filename: str) -> str:
    """Return a file's name that no client takes for a path: without folders, in printable characters."""
    name = re.split(r"[/\\]", filename)[-1]
    printable = "".join(each if each.isprintable() else "_" for each in name)[-MAX_FILENAME_CHARS:]
    return "file" if printable in _NO_NAMES else printable


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded file, or one with the results of a batch. Times are Unix seconds. `owner` stands for the
    tenant and the key of the request that brought it."""

    id: str
    owner: str
    purpose: str
    filename: str
    num_bytes: int
    created_at: int
    expires_at: int | None = None
    number: int = 0
    """Numbers all files and batches of a store in the order in which they came."""

    def is_kept(self, now: int) -> bool:
        """Whether it has not expired."""
        return self.expires_at is None or self.expires_at >= now

    def json(self) -> JsonObject:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": base_name(self.filename),
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class BatchStatus(StrEnum):
    """OpenAI's states of a batch."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


UNFINISHED = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)


class LineProblem(msgspec.Struct, frozen=True):
    """A fault of a line of the input file. `line` counts from 1; None means the file as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class ResultCounts(msgspec.Struct, frozen=True):
    """Numbers of requests whose results are durable."""

    completed: int = 0
    failed: int = 0

    @property
    def total(self) -> int:
        return self.completed + self.failed


class BatchUsage(msgspec.Struct, frozen=True):
    """Sums over the answers of a batch, in tokens."""

    num_input: int = 0
    num_cached: int = 0
    num_output: int = 0
    num_reasoning: int = 0

    def plus(self, other: "BatchUsage") -> "BatchUsage":
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return BatchUsage(*(a + b for a, b in pairs))

    def json(self) -> JsonObject:
        return {
            "input_tokens": self.num_input,
            "input_tokens_details": {"cached_tokens": self.num_cached},
            "output_tokens": self.num_output,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning},
            "total_tokens": self.num_input + self.num_output,
        }


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. The files of its results have their ids from the start, and are shown once they are published.

    Its requests count for `tenant`, and have the rights of `sender`, None where nobody was asked for a key.
    """

    id: str
    owner: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: BatchStatus = BatchStatus.VALIDATING
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    output_id: str = msgspec.field(default_factory=lambda: new_id("file-"))
    errors_id: str = msgspec.field(default_factory=lambda: new_id("file-"))
    has_output: bool = False
    has_errors: bool = False
    model: str | None = None
    problems: list[LineProblem] = []
    num_requests: int = 0
    counts: ResultCounts = ResultCounts()
    usage: BatchUsage = BatchUsage()
    sender: Identity | None = None
    forecast_at: int | None = None
    is_expired: bool = False
    """Whether its time was over before all its requests were finished."""
    times: dict[BatchStatus, int] = {}
    """When it entered each state."""
    number: int = 0

    def moved(self, status: BatchStatus, now: int, **changes: Any) -> "Batch":
        """Return the batch in its next state."""
        times = {**self.times, status: now}
        return msgspec.structs.replace(self, status=status, times=times, **changes)

    def json(self) -> JsonObject:
        """Return OpenAI's object, with the forecast of its end (`estimated_completion_at`) beside its fields."""
        problems = {"object": "list", "data": msgspec.to_builtins(self.problems)}
        times = {f"{status}_at": self.times.get(status) for status in BatchStatus if status != "validating"}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": problems if self.problems else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.errors_id if self.has_errors else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **times,
            "request_counts": {
                "total": self.num_requests,
                "completed": self.counts.completed,
                "failed": self.counts.failed,
            },
            "usage": self.usage.json(),
            "metadata": self.metadata,
            "estimated_completion_at": self.forecast_at if self.status is BatchStatus.IN_PROGRESS else None,
        }


def new_id(prefix: Literal["file-", "batch_"]) -> str:
    return prefix + secrets.token_hex(12)
