"""One request's life on the wire: what is measured of it and whether it counts as served."""

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from load.apis import Dialect, Piece, Prompt
from load.sse import EventSplitter

DONE = b"[DONE]"
MAX_ERROR_BYTES = 4096


class FailureKind(StrEnum):
    """Why a request does not count as served."""

    HTTP = "http"
    ERROR_EVENT = "error_event"
    SHORT = "short"
    NO_TERMINATOR = "no_terminator"
    MALFORMED = "malformed"
    TIMEOUT = "timeout"
    CONNECTION = "connection"


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong, in a form to count (`label`) and in words (`detail`)."""

    kind: FailureKind
    detail: str
    status: int | None = None

    @property
    def label(self) -> str:
        return f"{self.kind}_{self.status}" if self.status else str(self.kind)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """What is asked for, fixed before the run."""

    index: int
    prompt: Prompt
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request, measured. Times are seconds of the run's clock."""

    planned: PlannedRequest
    intended_s: float
    """When it should have been sent."""
    started_s: float
    """When this client came to it; the difference is client wait."""
    ended_s: float
    """When the stream was over, however it ended."""
    event_times_s: "array[float]"
    """Arrival of each token event. Events read from the socket together share a time."""
    prompt_tokens: int | None
    """As the server counted them; None where it did not say."""
    output_tokens: int
    output_tokens_counted_by: str
    """`usage` (the server's count) or `events` (one for each token event: a lower bound)."""
    finish_reason: str | None
    failure: Failure | None

    @property
    def is_ok(self) -> bool:
        return self.failure is None

    @property
    def client_wait_s(self) -> float:
        return self.started_s - self.intended_s

    @property
    def ttft_s(self) -> float | None:
        """Intended send to first token event."""
        return self.event_times_s[0] - self.intended_s if self.event_times_s else None

    @property
    def e2e_s(self) -> float:
        """Intended send to the end of the stream."""
        return self.ended_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (tokens - 1)."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass(slots=True)
class Tally:
    """The run's live counts, read by the progress view."""

    num_planned: int | None = None
    num_started: int = 0
    num_served: int = 0
    num_failed: int = 0
    num_token_events: int = 0

    @property
    def num_in_flight(self) -> int:
        return self.num_started - self.num_served - self.num_failed


@dataclass(slots=True)
class StreamReader:
    """Reads one response as it arrives (a `connection.Receiver`), then judges it."""

    dialect: Dialect
    tally: Tally
    must_be_full: bool
    """Whether fewer tokens than asked for is a failure."""
    times_s: "array[float]" = field(default_factory=lambda: array("d"))
    last_read_s: float = 0.0
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    _events: EventSplitter = field(default_factory=EventSplitter)
    _status: int | None = None
    _error_body: bytes = b""
    _counted_by_event: int | None = None
    _completion_tokens: int | None = None
    _is_terminated: bool = False
    _failure: Failure | None = None

    def on_status(self, status: int) -> None:
        self._status = status

    def on_body(self, piece: bytes, at: float) -> None:
        self.last_read_s = at
        if self._status != 200:
            self._error_body = (self._error_body + piece)[:MAX_ERROR_BYTES]
            return
        for data in self._events.feed(piece):
            if data == DONE:
                self._is_terminated = True
            else:
                self._on_event(data, at)

    def _on_event(self, data: bytes, at: float) -> None:
        try:
            piece = self.dialect.read(data)
        except ValueError as error:
            self._failure = self._failure or Failure(FailureKind.MALFORMED, f"{error}: {data[:200]!r}")
            return
        if piece.has_text:
            self.times_s.append(at)
            self.tally.num_token_events += 1
        self._note(piece)

    def _note(self, piece: Piece) -> None:
        if piece.num_tokens is not None:
            self._counted_by_event = (self._counted_by_event or 0) + piece.num_tokens
        if piece.prompt_tokens is not None:
            self.prompt_tokens = piece.prompt_tokens
        if piece.completion_tokens is not None:
            self._completion_tokens = piece.completion_tokens
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason
        if piece.error is not None:
            self._failure = self._failure or Failure(FailureKind.ERROR_EVENT, piece.error)

    @property
    def output_tokens(self) -> int:
        """The server's count where it gives one, else the number of token events."""
        reported = self._reported_tokens
        return len(self.times_s) if reported is None else reported

    @property
    def counted_by(self) -> str:
        return "events" if self._reported_tokens is None else "usage"

    @property
    def _reported_tokens(self) -> int | None:
        return self._counted_by_event if self._completion_tokens is None else self._completion_tokens

    def judge(self, asked_tokens: int, transport_failure: Failure | None) -> Failure | None:
        """Why this request failed, None where it did not.

        What the server said comes before how the connection ended (`transport_failure`).
        """
        if self._status not in (None, 200):
            return Failure(FailureKind.HTTP, self._error_body.decode(errors="replace"), self._status)
        return self._failure or transport_failure or self._judge_end(asked_tokens)

    def _judge_end(self, asked_tokens: int) -> Failure | None:
        if self.dialect.ends_with_done and not self._is_terminated:
            return Failure(FailureKind.NO_TERMINATOR, f"ended without [DONE] after {len(self.times_s)} token events")
        if not self._events.is_between_events:
            return Failure(FailureKind.NO_TERMINATOR, "ended inside an event")
        return self._judge_length(asked_tokens)

    def _judge_length(self, asked_tokens: int) -> Failure | None:
        # Events are a lower bound of tokens, so where only they were counted the server's word is taken.
        is_full = self.output_tokens >= asked_tokens or (self.counted_by == "events" and self.finish_reason == "length")
        if is_full or not self.must_be_full:
            return None
        return Failure(
            FailureKind.SHORT, f"{self.output_tokens} of {asked_tokens} tokens, counted by {self.counted_by}"
        )
