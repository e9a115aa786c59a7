"""The lines of a batch's input file: their shape, and what is wrong with them. For threads: a file may be long."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from sluice.gateway.answers.batches.records import LineProblem
from sluice.gateway.front.long_work import breathe

T = TypeVar("T")

ENDPOINTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/rerank", "/v1/score"),
)
"""Routes that a batch may ask."""
MAX_LINE_BYTES = 16 << 20
"""Longest line: parsing a longer one would keep the interpreter's lock for too long."""
MAX_ID_CHARS = 512
MAX_PROBLEMS = 100
"""Most problems that are listed."""
_PIECE_BYTES = 256 << 10
"""Bytes that are checked between two pauses."""
_SHOWN_CHARS = 60
_UNFIT = ("stream", "background")
"""Fields of a body that would make its answer none that is whole."""
_BOM = b"\xef\xbb\xbf"


class RequestLine(NamedTuple):
    """One request of a batch. `number` is that of its line, from 1; `body` is JSON as it stands in the file."""

    number: int
    custom_id: str
    url: str
    model: str
    body: bytes


class LineError(Exception):
    """Raised for a line that is no request."""

    def __init__(self, number: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.problem = LineProblem(code, message, number, param)


@dataclass(slots=True)
class CheckedFile:
    """The findings of a pass over an input file. `ids` has the line of each custom id, `targets` the first line of
    each pair of url and model."""

    num_requests: int = 0
    ids: dict[str, int] = field(default_factory=dict)
    targets: dict[tuple[str, str], int] = field(default_factory=dict)
    problems: list[LineProblem] = field(default_factory=list)


def check_file(path: Path, max_requests: int, endpoint: str | None = None) -> CheckedFile:
    """Check every line. All must ask `endpoint`, where that is given."""
    found = CheckedFile()
    for number, raw in read_raw_lines(path):
        found.num_requests += 1
        if found.num_requests > max_requests:
            message = f"the file has more than {max_requests} requests (--max-batch-requests)"
            found.problems.append(LineProblem("too_many_requests", message))
            break
        try:
            line = parse_line(number, raw, endpoint)
            if (first := found.ids.setdefault(line.custom_id, number)) != number:
                message = f"custom_id must be unique in the file, and {line.custom_id!r:.80} is that of line {first}"
                raise LineError(number, "duplicate_custom_id", message, "custom_id")
        except LineError as error:
            found.problems.append(error.problem)
            if len(found.problems) == MAX_PROBLEMS:
                break
            continue
        found.targets.setdefault((line.url, line.model), number)
    if not found.num_requests:
        found.problems.append(LineProblem("empty_file", "the file has no requests"))
    return found


def pending_lines(path: Path, finished: Collection[str]) -> Iterator[RequestLine]:
    """Yield the requests of a file that was checked, without the `finished` ones."""
    for number, raw in read_raw_lines(path):
        line = parse_line(number, raw)
        if line.custom_id not in finished:
            yield line


def read_raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each line that is not blank, with pauses for other threads."""
    num_read, number = 0, 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            num_read += len(line)
            if num_read > _PIECE_BYTES:
                num_read = 0
                breathe()
            text = (line.removeprefix(_BOM) if number == 1 else line).strip()
            if text:
                yield number, text
            is_long = len(line) > MAX_LINE_BYTES  # parse_line refuses it
            while is_long and line and not line.endswith(b"\n"):
                line = file.readline(_PIECE_BYTES)


def parse_line(number: int, raw: bytes, endpoint: str | None = None) -> RequestLine:
    """Parse one line. Raises LineError, which names the field."""
    if len(raw) > MAX_LINE_BYTES:
        raise LineError(number, "line_too_long", f"the line must have at most {MAX_LINE_BYTES} bytes")
    fields = _decode(number, raw, dict[str, msgspec.Raw], "the line")
    custom_id = _read_text(number, fields, "custom_id")
    if not 1 <= len(custom_id) <= MAX_ID_CHARS:
        message = f"custom_id must have 1 to {MAX_ID_CHARS} characters, got {len(custom_id)}"
        raise LineError(number, "invalid_value", message, "custom_id")
    if (method := _read_text(number, fields, "method")) != "POST":
        raise LineError(number, "invalid_method", f"method must be 'POST', got {_shown(method)}", "method")
    url = _read_text(number, fields, "url")
    if endpoint is not None and url != endpoint:
        message = f"url must be the batch's endpoint, {endpoint!r}, got {_shown(url)}"
        raise LineError(number, "mismatched_endpoint", message, "url")
    if url not in ENDPOINTS:
        message = f"url must be one of {', '.join(ENDPOINTS)}, got {_shown(url)}"
        raise LineError(number, "invalid_url", message, "url")
    body = _require(number, fields, "body")
    inner = _decode(number, bytes(body), dict[str, msgspec.Raw], "body")
    model = _read_text(number, inner, "model", "body.model")
    for name in _UNFIT:
        if bytes(inner.get(name, b"false")) not in (b"false", b"null"):
            message = f"body.{name} must be false or absent: the answers of a batch are whole"
            raise LineError(number, "invalid_value", message, f"body.{name}")
    return RequestLine(number, custom_id, url, model, bytes(body))


def _require(number: int, fields: dict[str, msgspec.Raw], name: str, path: str = "") -> msgspec.Raw:
    if name not in fields:
        raise LineError(number, "missing_required_parameter", f"{path or name} is required", path or name)
    return fields[name]


def _read_text(number: int, fields: dict[str, msgspec.Raw], name: str, path: str = "") -> str:
    raw = bytes(_require(number, fields, name, path))
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        got = _shown(raw.decode(errors="replace"))
        raise LineError(number, "invalid_type", f"{path or name} must be a string, got {got}", path or name) from None


def _decode(number: int, raw: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise LineError(number, "invalid_type", f"{what} must be a JSON object ({error})") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        got = _shown(raw.decode(errors="replace"))
        raise LineError(number, "invalid_json_line", f"{what} must be a JSON object, got {got} ({error})") from None


def _shown(value: Any) -> str:
    return f"{str(value)[:_SHOWN_CHARS]!r}"
