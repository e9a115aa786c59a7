"""Reads one request on the wire: its stream of events, its measurement, and whether it counts as served."""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sluice.load.answers import AnswerCheck, AnswerRecord
from sluice.load.apis import Api, AskedTurn, Framing, ParsedEvent, Prompt
from sluice.load.connection import ResponseReceiver


class EventSplitter:
    """Splits a response body into the data of server-sent events, wherever the network cut it.

    Carriage returns are dropped: JSON escapes its own, so any on the wire belong to line ends.
    """

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of every event that `piece` completes, without comments and empty events."""
        if not self._pending and _is_one_event(piece):
            return [piece[6:-2]]
        if b"\r" in piece:
            piece = piece.replace(b"\r", b"")
        *blocks, self._pending = (self._pending + piece).split(b"\n\n")
        return [data for block in blocks if (data := _event_data(block))]

    @property
    def is_between_events(self) -> bool:
        """Return whether all bytes so far belong to complete events."""
        return not self._pending.strip()


class LineSplitter:
    """Splits a response body of JSON lines."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return every line that `piece` completes, without empty ones."""
        *lines, self._pending = (self._pending + piece).split(b"\n")
        return [line for line in lines if line.strip()]

    @property
    def is_between_events(self) -> bool:
        return not self._pending.strip()


class WholeBody:
    """Keeps a response body until its end."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return no event: the end of the body is known to who reads the response."""
        self._pieces.append(piece)
        return []

    @property
    def is_between_events(self) -> bool:
        return True

    def take(self) -> bytes:
        return b"".join(self._pieces)


Splitter = EventSplitter | LineSplitter | WholeBody
SPLITTERS: dict[Framing, type[Splitter]] = {
    Framing.SSE: EventSplitter,
    Framing.JSON_LINES: LineSplitter,
    Framing.WHOLE: WholeBody,
}


def _is_one_event(piece: bytes) -> bool:
    """Return whether the piece is one whole event of one line, the usual case: to ask takes a third of a split."""
    return piece.startswith(b"data: ") and piece.endswith(b"\n\n") and piece.find(b"\n") == len(piece) - 2


def _event_data(block: bytes) -> bytes:
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines = (line for line in block.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)


DONE = b"[DONE]"
MAX_ERROR_BYTES = 4096


class FailureKind(StrEnum):
    """The ways in which a request fails."""

    HTTP = "http"
    ERROR_EVENT = "error_event"
    SHORT = "short"
    NO_TERMINATOR = "no_terminator"
    MALFORMED = "malformed"
    TIMEOUT = "timeout"
    CONNECTION = "connection"
    GRPC = "grpc"
    SCHEMA = "schema"
    """The answer is not JSON that meets the schema."""
    TOOL_CALL = "tool_call"


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason of a failed request: a `label` to count by, and the `detail` in words."""

    kind: FailureKind
    detail: str
    status: int | str | None = None

    @property
    def label(self) -> str:
        return f"{self.kind}_{self.status}" if self.status else str(self.kind)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request as it is planned before the run."""

    index: int
    prompt: Prompt
    prompt_tokens: int
    output_tokens: int
    leaves_after: int | None = None
    """The token event after which its client leaves; None for one that reads to the end."""
    at_s: float | None = None
    """The time that a trace gives it, in seconds from its start; None without a trace that has times."""
    images: tuple[str, ...] = ()
    """PNG images in base64."""
    turn: int = 1
    """Its number in its session."""
    think_s: float = 0.0
    """Time from the end of the turn before it to its intended send."""
    later: "tuple[PlannedRequest, ...]" = ()
    """The other turns of its session, where it is the first."""
    history: tuple[AskedTurn, ...] = ()
    """The turns before it, known once they have been answered."""


@dataclass(frozen=True, slots=True)
class RequestResult:
    """The measurement of one request. Times are seconds of the run's clock."""

    planned: PlannedRequest
    intended_s: float
    """The time at which the request should have been sent."""
    started_s: float
    """The time at which this client began to send it. The difference is client wait."""
    ended_s: float
    """The time at which the stream ended, however it ended."""
    event_times_s: "array[float]"
    """Arrival of each token event. Events that are read from the socket together share a time."""
    prompt_tokens: int | None
    """The server's count; None where it sent none."""
    output_tokens: int
    output_tokens_counted_by: str
    """`usage` for the server's count, or `events` for one token an event, a lower bound."""
    finish_reason: str | None
    failure: Failure | None
    has_left: bool = False
    """This client broke it off, as planned. Such a request counts neither as served nor as failed."""
    sources_at_s: float | None = None
    """The time at which the result of a retrieval arrived."""
    num_tool_calls: int = 0

    @property
    def retrieval_s(self) -> float | None:
        """Seconds from the intended send to the result of the retrieval."""
        return None if self.sources_at_s is None else self.sources_at_s - self.intended_s

    @property
    def is_ok(self) -> bool:
        return self.failure is None and not self.has_left

    @property
    def client_wait_s(self) -> float:
        return self.started_s - self.intended_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the intended send to the first token event."""
        return self.event_times_s[0] - self.intended_s if self.event_times_s else None

    @property
    def e2e_s(self) -> float:
        """Seconds from the intended send to the end of the stream."""
        return self.ended_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first: (E2E - TTFT) / (tokens - 1)."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass(slots=True)
class LiveCounts:
    """Counts of a run while it goes on, read by the progress view."""

    num_planned: int | None = None
    num_started: int = 0
    num_served: int = 0
    num_failed: int = 0
    num_left: int = 0
    num_token_events: int = 0

    @property
    def num_in_flight(self) -> int:
        return self.num_started - self.num_served - self.num_failed - self.num_left


@dataclass(slots=True)
class StreamReader(ResponseReceiver):
    """Reads one response as it arrives, and finds out why it failed."""

    api: Api
    counts: LiveCounts
    must_be_complete: bool
    """Fewer tokens than requested are a failure."""
    leaves_after: int | None = None
    """Number of token events after which `on_leaving` is called."""
    on_leaving: Callable[[], None] = lambda: None
    checks: Mapping[FailureKind, AnswerCheck] = field(default_factory=dict)
    """The demands that an answer must meet, by the kind of failure where it does not."""
    answer: AnswerRecord = field(default_factory=AnswerRecord)
    """The answer itself, where the API keeps it."""
    sources_at_s: float | None = None
    times_s: "array[float]" = field(default_factory=lambda: array("d"))
    last_read_s: float = 0.0
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    _events: Splitter = field(init=False)
    _status: int | None = None
    _error_body: bytes = b""
    _counted_by_event: int | None = None
    _completion_tokens: int | None = None
    _is_terminated: bool = False
    _failure: Failure | None = None

    def __post_init__(self) -> None:
        self._events = SPLITTERS[self.api.framing]()

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
            event = self.api.parse(data)
        except ValueError as error:
            self._failure = self._failure or Failure(FailureKind.MALFORMED, f"{error}: {data[:200]!r}")
            return
        self.take(event, at)

    def take(self, event: ParsedEvent, at: float) -> None:
        """Receive an event that came in another way than in the body of a response."""
        self.last_read_s = at
        if event.has_text and self.api.framing is not Framing.WHOLE:
            self.times_s.append(at)
            self.counts.num_token_events += 1
            if len(self.times_s) == self.leaves_after:
                self.on_leaving()
        if event.has_sources:
            self.sources_at_s = at
        if self.api.keeps_answers:
            self.answer.add(event)
        self._record(event)

    def _record(self, event: ParsedEvent) -> None:
        if event.num_tokens is not None:
            self._counted_by_event = (self._counted_by_event or 0) + event.num_tokens
        if event.prompt_tokens is not None:
            self.prompt_tokens = event.prompt_tokens
        if event.completion_tokens is not None:
            self._completion_tokens = event.completion_tokens
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
        self._is_terminated = self._is_terminated or event.is_last
        if event.error is not None:
            self._failure = self._failure or Failure(FailureKind.ERROR_EVENT, event.error)

    @property
    def output_tokens(self) -> int:
        """The server's count where it sends one, else the number of token events."""
        reported = self._reported_tokens
        return len(self.times_s) if reported is None else reported

    @property
    def counted_by(self) -> str:
        return "events" if self._reported_tokens is None else "usage"

    @property
    def _reported_tokens(self) -> int | None:
        return self._counted_by_event if self._completion_tokens is None else self._completion_tokens

    def find_failure(self, requested_tokens: int, transport_failure: Failure | None) -> Failure | None:
        """Return the failure of this request, None if it was served.

        A failure that the server reported takes precedence over how the connection ended (`transport_failure`).
        """
        if self._status not in (None, 200):
            return Failure(FailureKind.HTTP, self._error_body.decode(errors="replace"), self._status)
        if isinstance(self._events, WholeBody) and transport_failure is None:
            self._on_event(self._events.take(), self.last_read_s)
        return self._failure or transport_failure or self._check_end(requested_tokens) or self._check_answer()

    def _check_end(self, requested_tokens: int) -> Failure | None:
        if self.api.has_terminator and not self._is_terminated:
            detail = f"ended without [DONE] or its last event after {len(self.times_s)} token events"
            return Failure(FailureKind.NO_TERMINATOR, detail)
        if not self._events.is_between_events:
            return Failure(FailureKind.NO_TERMINATOR, "ended inside an event")
        return self._check_length(requested_tokens)

    def _check_length(self, requested_tokens: int) -> Failure | None:
        # Events are a lower bound of tokens. Where only they were counted, the finish reason decides.
        is_complete = self.output_tokens >= requested_tokens or (
            self.counted_by == "events" and self.finish_reason == "length"
        )
        if is_complete or not self.must_be_complete or not self.api.has_output_tokens:
            return None
        return Failure(
            FailureKind.SHORT, f"{self.output_tokens} of {requested_tokens} tokens, counted by {self.counted_by}"
        )

    def _check_answer(self) -> Failure | None:
        for kind, check in self.checks.items():
            wrong = check(self.answer)
            if wrong is not None:
                return Failure(kind, f"{wrong} (finish reason {self.finish_reason})")
        return None
