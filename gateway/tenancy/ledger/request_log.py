"""The request log: requests and answers as lines of JSON, by their hashes or, if the operator wants, with texts."""

import random
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from typing import Any

import orjson
import re2

from sluice.gateway.calls import Call, CallObserver
from sluice.gateway.tenancy.ledger.access_log import describe_call
from sluice.gateway.tenancy.ledger.lines import LineWriter, Sink
from sluice.gateway.tenancy.ledger.rows import reached_model

MAX_CONTENT_BYTES = 256 << 10
"""Longer bodies are logged by their hash alone."""
REDACTED = "[redacted]"


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
            self._open[call] = Capture(call, keeps_text=self._keeps_text)
            call.tell_bodies(self)

    def note_received(self, call: Call, piece: bytes) -> None:
        """Add a piece of the request."""
        if call in self._open:
            self._open[call].request.add(piece)

    def note_sent(self, call: Call, piece: bytes) -> None:
        """Add a piece of the answer."""
        if call in self._open:
            self._open[call].answer.add(piece)

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
