"""The logs of calls: a line of text or JSON for each request, and requests and answers by their hashes or with texts.

Lines go to standard output, or to files that rotate, by a thread of each log.
"""

import json
import logging
import os
import random
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from time import gmtime, strftime
from typing import Any, Protocol, TypeVar

import orjson
import re2
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.gateway.calls import Call, CallObserver
from sluice.gateway.tenancy.ledger.rows import reached_model
from sluice.record.batches import BatchWriter
from sluice.state.calendar_clock import CalendarClock

T = TypeVar("T")
log = logging.getLogger(__name__)

_FLUSH_S = 0.2
_MAX_WAITING = 20_000
"""Lines that wait for a slow disk or pipe; those that come then are lost, and counted."""
_LAST_WRITE_S = 2.0
_NUM_FILES = 8
"""A file is full at this part of what all may have together."""
_DAY_S = 86_400.0
_STDOUT = 1
_PLAIN = re.compile(r"[!#-\[\]-~]+")
MAX_CONTENT_BYTES = 256 << 10
"""Longer bodies are logged by their hash alone."""
REDACTED = "[redacted]"


class Sink(Protocol):
    """Where lines go. Called by one thread."""

    def write(self, lines: Sequence[str]) -> None:
        """Write lines, each with its end. Raises OSError."""


class LineWriter(BatchWriter[T], Collector):
    """Formats items and writes their lines."""

    def __init__(self, name: str, sink: Sink, format_line: Callable[[T], str]) -> None:
        """`format_line` returns a line without its end."""
        super().__init__(f"sluice-{name}-log", _MAX_WAITING, _MAX_WAITING, _FLUSH_S, _LAST_WRITE_S)
        self._log_name = name
        self._sink = sink
        self._format = format_line
        self._is_failing = False
        self._num_dropped = self._num_failed = 0

    def put(self, item: T) -> None:
        """Have an item written soon, with others."""
        if not self.offer(item):
            self._num_dropped += 1

    def write(self, items: list[T]) -> None:
        """Write the lines of items, or count them as lost."""
        try:
            self._sink.write([f"{self._format(each)}\n" for each in items])
            self._is_failing = False
        except Exception as error:
            if not self._is_failing:
                log.warning("the %s log cannot be written: %s; its lines are lost until it can", self._log_name, error)
            self._is_failing = True
            self._num_failed += len(items)

    def collect(self) -> Iterable[Metric]:
        """Return the number of lost lines."""
        name, lost = self._log_name, self._num_dropped + self._num_failed
        text = f"Lines of the {name} log that were lost: its disk or pipe was too slow, or could not be written."
        return (CounterMetricFamily(f"sluice_{name}_log_dropped_lines", text, lost),)


class StandardOutput:
    """Writes to standard output, as web servers do in containers.

    Not through `sys.stdout`: while a full pipe holds its lock, the process could not end.
    """

    def write(self, lines: Sequence[str]) -> None:
        """Write lines, however long their reader takes."""
        left = memoryview("".join(lines).encode())
        while left:
            left = left[os.write(_STDOUT, left) :]


class RotatingFile:
    """Writes to a file that is renamed when it is full or a day old. Files too old or too many are deleted.

    `requests.jsonl` becomes `requests.20261123T120000Z.jsonl`. Only the owner may read what clients sent.
    """

    def __init__(self, path: Path, max_bytes: int, max_age_days: int, clock: Callable[[], float] | None = None) -> None:
        """Keep at most `max_bytes` in all files together, each for `max_age_days` by `clock`."""
        self._path = path
        self._max_bytes = max_bytes
        self._max_age_s = max_age_days * _DAY_S
        self._clock = clock or CalendarClock()
        self._began = 0.0

    def write(self, lines: Sequence[str]) -> None:
        """Append lines to the file that is there, or to a new one."""
        content = "".join(lines).encode()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            status = self._path.stat()
            began = self._began or status.st_mtime
            if status.st_size + len(content) > self._max_bytes // _NUM_FILES or self._clock() - began > _DAY_S:
                self._rotate()
        if not self._path.exists():
            self._path.touch(0o600)
            self._began = self._clock()
        with self._path.open("ab") as file:
            file.write(content)

    def _rotate(self) -> None:
        now = self._clock()
        stamp, number = strftime("%Y%m%dT%H%M%SZ", gmtime(now)), 0
        while (target := self._rotated(f"{stamp}{f'-{number}' if number else ''}")).exists():
            number += 1
        self._path.rename(target)
        files = sorted(self._path.parent.glob(f"{self._path.stem}.*{self._path.suffix}"), key=_age_key)
        total = sum(each.stat().st_size for each in files)
        for each in files:
            status = each.stat()
            is_old = now - status.st_mtime > self._max_age_s
            if is_old or total > self._max_bytes * (_NUM_FILES - 1) // _NUM_FILES:
                each.unlink()
                total -= status.st_size

    def _rotated(self, stamp: str) -> Path:
        return self._path.with_name(f"{self._path.stem}.{stamp}{self._path.suffix}")


def _age_key(path: Path) -> tuple[float, str]:
    return path.stat().st_mtime, path.name


# -- the access log


class AccessLog(LineWriter[Call], CallObserver):
    """Writes a line for each call that ends, those that were refused too."""

    def __init__(self, sink: Sink, *, is_json: bool) -> None:
        super().__init__("access", sink, _format_json if is_json else _format_text)

    def end(self, call: Call) -> None:
        """Have the line of a call written soon."""
        self.put(call)


def describe_call(call: Call) -> dict[str, Any]:
    """Return what an ended call was and used, without anything that was said."""
    started = call.started
    fields = {
        "time": datetime.fromtimestamp(call.arrived_at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "source": call.source,
        "key": "" if call.identity is None else call.identity.name,
        "tenant": call.tenant,
        "protocol": call.protocol,
        "operation": call.operation,
        "status": call.status,
        "bytes_in": call.bytes_in,
        "bytes_out": call.bytes_out,
        "duration_s": round(call.ended - started, 6),
        "request_id": call.request_id,
    }
    if call.model:
        fields |= {
            "ttft_s": round(call.first_token - started, 6) if call.first_token else None,
            "model": call.model,
            "adapter": call.adapter,
            "prompt_tokens": call.prompt_tokens,
            "cached_tokens": call.cached_tokens,
            "generated_tokens": call.generated_tokens,
            "finish": call.finish,
        }
    return fields | _optional_names(call)


def _optional_names(call: Call) -> dict[str, str]:
    """Return what few calls name, by the names of fields."""
    named = {"route": call.route, "session": call.session, "parent_session": call.parent_session}
    return {name: text for name, text in named.items() if text}


def _format_json(call: Call) -> str:
    fields = describe_call(call)
    line = orjson.dumps(fields).decode()
    return line if line.isascii() else json.dumps(fields)  # terminals obey some characters beyond ASCII


def _format_text(call: Call) -> str:
    """Return nginx' first words in its order, then what it has no word for as NAME=VALUE."""
    fields = describe_call(call)
    status = "-" if call.status is None else call.status
    asked = orjson.dumps(f"{call.protocol} {call.operation}").decode()
    line = f"{call.source or '-'} {_word(fields['key'])} [{fields['time']}] {_escaped(asked)} {status}"
    line += f" {call.bytes_in} {call.bytes_out} {fields['duration_s']:.6f} id={_word(call.request_id)}"
    if not call.model:
        return line
    ttft = "-" if fields["ttft_s"] is None else f"{fields['ttft_s']:.6f}"
    named = {"model": call.model, "adapter": call.adapter, "finish": call.finish}
    named |= _optional_names(call)
    counts = f"prompt={call.prompt_tokens} cached={call.cached_tokens} generated={call.generated_tokens}"
    return f"{line} ttft={ttft} {counts} {' '.join(f'{name}={_word(text)}' for name, text in named.items())}"


def _word(text: str) -> str:
    """Return a text as one word: clients choose some of them, and must not write lines of their own."""
    if not text:
        return "-"
    return text if _PLAIN.fullmatch(text) else _escaped(orjson.dumps(text).decode())


def _escaped(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


# -- the request log


class Content:
    """One body, as it passes: its hash, its length, and its text as far as that is wanted."""

    __slots__ = ("_digest", "_pieces", "num_bytes")

    def __init__(self, *, keeps_text: bool) -> None:
        self._digest = sha256()
        self._pieces: list[bytes] | None = [] if keeps_text else None
        self.num_bytes = 0

    def add(self, piece: bytes) -> None:
        self._digest.update(piece)
        self.num_bytes += len(piece)
        if self._pieces is not None and self.num_bytes <= MAX_CONTENT_BYTES:
            self._pieces.append(piece)

    def describe(self, redact: "Redaction") -> dict[str, Any]:
        """Return length and hash, and the redacted content where it is whole and JSON.

        Streams are not: what a pattern would find may be spread over their events.
        """
        fields: dict[str, Any] = {"bytes": self.num_bytes, "sha256": self._digest.hexdigest()}
        if self._pieces and self.num_bytes <= MAX_CONTENT_BYTES:
            with suppress(ValueError, TypeError, RecursionError):  # what is not JSON, or too deep, has a hash alone
                content = redact.apply(orjson.loads(b"".join(self._pieces)))
                fields["content"] = orjson.Fragment(orjson.dumps(content))
        return fields


class Redaction:
    """Replaces what patterns find in texts. They are RE2's, whose time is linear in the text."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises ValueError, which names the pattern."""
        self._patterns = []
        options = re2.Options()
        options.log_errors = False
        for each in patterns:
            try:
                self._patterns.append(re2.compile(each, options))
            except re2.error as error:
                raise ValueError(f"{each!r} is no pattern of RE2: {error}") from None

    def apply(self, value: Any) -> Any:
        """Return a value of JSON with all its texts redacted, the names of its fields included."""
        if isinstance(value, str):
            for pattern in self._patterns:
                value = pattern.sub(REDACTED, value)
            return value
        if isinstance(value, list):
            return [self.apply(each) for each in value]
        if isinstance(value, dict):
            return {self.apply(name): self.apply(each) for name, each in value.items()}
        return value


class Capture:
    """The bodies of one call."""

    __slots__ = ("answer", "call", "request")

    def __init__(self, call: Call, *, keeps_text: bool) -> None:
        self.call = call
        self.request = Content(keeps_text=keeps_text)
        self.answer = Content(keeps_text=keeps_text)

    def add(self, piece: bytes, is_answers: bool) -> None:
        """Add a piece of the request or of the answer."""
        (self.answer if is_answers else self.request).add(piece)


class RequestLog(LineWriter[Capture], CallObserver):
    """Writes a line for a part of the calls that reached a model."""

    def __init__(self, sink: Sink, redaction: Redaction, *, sample_rate: float = 1.0, keeps_text: bool = False) -> None:
        super().__init__("request", sink, self._format_capture)
        self._redaction = redaction
        self._sample_rate = sample_rate
        self._keeps_text = keeps_text
        self._open: dict[Call, Capture] = {}

    async def begin(self, call: Call) -> None:
        """Choose by chance whether a call is logged."""
        if call.group is not None and random.random() < self._sample_rate:
            capture = self._open[call] = Capture(call, keeps_text=self._keeps_text)
            call.on_body = capture.add

    def end(self, call: Call) -> None:
        """Have the line of a call written soon."""
        capture = self._open.pop(call, None)
        if capture is not None and reached_model(call):
            self.put(capture)

    def _format_capture(self, capture: Capture) -> str:
        fields = describe_call(capture.call)
        if capture.call.protocol != "grpc":  # which has tensors
            fields |= {
                "request": capture.request.describe(self._redaction),
                "answer": capture.answer.describe(self._redaction),
            }
        return orjson.dumps(fields).decode()
