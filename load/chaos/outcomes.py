"""The ends of requests, and which of them break a promise."""

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum

from sluice.load.chaos.answers import find_misshape
from sluice.load.chaos.fleet import ECHO, PIPELINE
from sluice.load.chaos.questions import Question, QuestionKind
from sluice.load.stream import Failure, FailureKind

MAX_EXAMPLES = 10
"""Examples that are kept of each notable outcome, the latest ones."""
_MAX_NAMED = 5
_MAX_TOLD = 100
"""Most broken promises that are reported as they happen."""
_EXPECTED_STATUSES = {429, 503, 504}
_EXPECTED_GRPC = {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
_CRASHED_TWICE = "crashed the engine twice"
"""The error of a request that lost two engines: any kill may take any request."""
STILL_READING = "are being encoded"
"""An answer from documents says so while a gateway that started again reads them."""
_BROKEN_TRANSPORT = (
    "Broken pipe",
    "Connection refused",
    "Connection reset",
    "Endpoint closing",
    "FD Shutdown",
    "GOAWAY",
    "Socket closed",
    "Stream removed",
    "connections to all backends",
    "failed to connect",
    "recvmsg",
)
"""Words of gRPC's own library about a connection that broke."""


class Outcome(StrEnum):
    """The outcome of a request."""

    COMPLETED = "completed"
    LEFT = "cancelled by its client"
    ERROR = "error"
    CUT = "cut by a kill"
    """Its connection broke while its gateway, or an HTTP worker of it, was killed, or the machine stood still."""
    LOST = "lost"
    HUNG = "hung"
    WRONG = "wrong"
    MISSHAPEN = "misshapen"


VIOLATIONS = (Outcome.LOST, Outcome.HUNG, Outcome.WRONG, Outcome.MISSHAPEN)


@dataclass(frozen=True, slots=True)
class OutcomeVerdict:
    """The outcome of a request, the label to count it by, and the details of a fault."""

    outcome: Outcome
    label: str = ""
    detail: str = ""


def judge(question: Question, text: str, failure: Failure | None, expected: str | None) -> OutcomeVerdict:
    """Judge a request that its client did not leave; one whose connection broke is lost. Pure.

    `expected` is the text that it must have, None where it is not known yet.
    """
    if failure is not None:
        return _judge_failure(question.kind, failure)
    if question.kind.model == PIPELINE and STILL_READING in text:
        return OutcomeVerdict(Outcome.COMPLETED)
    if expected is not None and text != expected:
        return OutcomeVerdict(Outcome.WRONG, "text", f"{text!r} in place of {expected!r}")
    return OutcomeVerdict(Outcome.COMPLETED)


def _judge_failure(kind: QuestionKind, failure: Failure) -> OutcomeVerdict:
    is_broken = failure.kind in (FailureKind.CONNECTION, FailureKind.NO_TERMINATOR)
    if failure.kind is FailureKind.CONNECTION and kind.is_grpc:
        is_broken = any(words in failure.detail for words in _BROKEN_TRANSPORT)
    if is_broken:
        return OutcomeVerdict(Outcome.LOST, str(failure.kind), failure.detail)
    if failure.kind is FailureKind.TIMEOUT:
        return OutcomeVerdict(Outcome.HUNG, str(failure.kind), failure.detail)
    if failure.kind in (FailureKind.SHORT, FailureKind.MALFORMED):
        return OutcomeVerdict(Outcome.WRONG, str(failure.kind), failure.detail)
    return _judge_error(kind, failure)


def _judge_error(kind: QuestionKind, failure: Failure) -> OutcomeVerdict:
    """Judge what the server itself called an error."""
    status = failure.status
    if isinstance(status, int) and (misshape := find_misshape(kind.api, status, failure.detail)) is not None:
        return OutcomeVerdict(Outcome.MISSHAPEN, failure.label, misshape)
    if kind.model == ECHO or _CRASHED_TWICE in failure.detail:
        return OutcomeVerdict(Outcome.ERROR, failure.label, failure.detail)
    is_expected = status in _EXPECTED_STATUSES or status in _EXPECTED_GRPC or not isinstance(status, int | str)
    return OutcomeVerdict(Outcome.ERROR if is_expected else Outcome.WRONG, failure.label, failure.detail)


@dataclass(slots=True)
class Tally:
    """Counts of the ends of requests, by kind, and examples of what is not as it should be."""

    counts: Counter[tuple[str, Outcome]] = field(default_factory=Counter)
    labels: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Ends other than completions, by kind and label."""
    examples: dict[str, deque[str]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """The first requests that broke a promise, as they came."""
    num_sent: int = 0
    num_output_tokens: int = 0

    def add(self, kind: str, verdict: OutcomeVerdict, about: str) -> None:
        self.counts[kind, verdict.outcome] += 1
        if verdict.outcome in (Outcome.COMPLETED, Outcome.LEFT):
            return
        self.labels[str(verdict.outcome), verdict.label] += 1
        seen = self.examples.setdefault(f"{verdict.outcome}: {verdict.label}", deque(maxlen=MAX_EXAMPLES))
        seen.append(text := f"{about}: {verdict.label}: {verdict.detail[:400]}")
        if verdict.outcome in VIOLATIONS and len(self.broken) < _MAX_TOLD:
            self.broken.append(f"{verdict.outcome}: {text}")

    def total(self, *outcomes: Outcome) -> int:
        return sum(count for (_, outcome), count in self.counts.items() if outcome in outcomes)

    def by_outcome(self) -> dict[Outcome, int]:
        """Return the number of requests by outcome."""
        return {outcome: count for outcome in Outcome if (count := self.total(outcome))}

    @property
    def num_ended(self) -> int:
        return sum(self.counts.values())

    def violations(self) -> list[str]:
        """Return the broken promises, with examples."""
        return [
            f"{count} requests {outcome}: {'; '.join(self._examples_of(outcome)[:_MAX_NAMED])}"
            for outcome in VIOLATIONS
            if (count := self.total(outcome))
        ]

    def _examples_of(self, outcome: Outcome) -> list[str]:
        return [each for key, seen in self.examples.items() if key.startswith(f"{outcome}: ") for each in seen]
