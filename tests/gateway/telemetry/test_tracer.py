"""Which requests are recorded and kept, whatever they do."""

from collections.abc import Iterator

import pytest

from sluice.gateway.telemetry.tracer import Tracer, finish_root
from sluice.record.spans import (
    MAX_SPANS,
    Recording,
    RemoteParent,
    Span,
    current_span,
    format_traceparent,
    parse_traceparent,
    remote_parent,
    span,
)

TRACE, PARENT = 0xA1, 0xB2
HEADER = f"00-{TRACE:032x}-{PARENT:016x}-01"


class Sink:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.num_exported = self.num_lost = 0
        self.kept: list[Recording] = []

    def put(self, recording: Recording) -> None:
        self.kept.append(recording)

    async def close(self) -> None: ...


@pytest.fixture(autouse=True)
def _nothing_recorded() -> Iterator[None]:
    yield
    current_span.set(None)
    remote_parent.set(None)


def test_a_traceparent_is_read_and_written() -> None:
    assert parse_traceparent(HEADER, "a=b") == RemoteParent(TRACE, PARENT, True, "a=b")
    assert format_traceparent(TRACE, PARENT, is_sampled=True) == HEADER
    later = HEADER.replace("00-", "01-", 1) + "-more"
    assert parse_traceparent(later) == RemoteParent(TRACE, PARENT, True)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00-1-2-01",
        HEADER + "-more",
        HEADER.replace("00-", "ff-", 1),
        f"00-{0:032x}-{PARENT:016x}-01",
        f"00-{TRACE:032x}-{0:016x}-01",
        HEADER.replace("a1", "A1"),
    ],
)
def test_a_wrong_traceparent_is_none(header: str) -> None:
    assert parse_traceparent(header) is None


def end(root: Span | None) -> None:
    assert root is not None
    finish_root(root, 200, is_failure=False)


def test_a_rate_decides_alike_for_one_trace_and_keeps_about_its_share() -> None:
    sink = Sink()
    tracer = Tracer(sink=sink, sample_rate=0.25)
    roots = [tracer.open("r", "id", {}) for _ in range(2000)]
    kept = [each for each in roots if each is not None]
    assert 350 < len(kept) < 650
    assert all(each.recording.trace_id & (2**64 - 1) < 2**62 for each in kept)
    for each in kept:
        end(each)
    assert len(sink.kept) == len(kept)


def test_a_parent_decides_whatever_the_rate() -> None:
    sampled, unsampled = RemoteParent(TRACE, PARENT, True), RemoteParent(TRACE, PARENT, False)
    remote_parent.set(sampled)
    root = Tracer(sink=Sink(), sample_rate=0.0).open("r", "id", {})
    assert root is not None
    assert root.recording.trace_id == TRACE
    assert root.traceparent == format_traceparent(TRACE, root.span_id, is_sampled=True)
    remote_parent.set(unsampled)
    assert Tracer(sink=Sink(), sample_rate=1.0).open("r", "id", {}) is None


def test_slow_requests_are_kept_beside_the_sampled_ones() -> None:
    sink = Sink()
    tracer = Tracer(sink=sink, sample_rate=0.0, slow_s=1.0)
    quick, slow = tracer.open("quick", "1", {}), tracer.open("slow", "2", {})
    assert quick is not None
    assert slow is not None
    assert slow.traceparent.endswith("-00")
    quick.end(quick.started_ns + 999_999_999)
    slow.end(slow.started_ns + 1_000_000_000)
    assert [each.root.name for each in sink.kept] == ["slow"]


def test_nothing_is_recorded_where_nobody_wants_it() -> None:
    tracer = Tracer()
    assert not tracer.is_active
    assert tracer.open("r", "id", {}) is None
    with span("work") as noted:
        assert noted is None


def test_a_recording_is_complete_when_its_last_span_has_ended() -> None:
    sink = Sink()
    root = Tracer(sink=sink).open("r", "id", {})
    assert root is not None
    later = root.child("later")
    root.end()
    assert not sink.kept
    later.end()
    later.end()
    assert len(sink.kept) == 1


def test_spans_nest_as_their_contexts_do_and_note_errors() -> None:
    root = Tracer(sink=Sink()).open("r", "id", {})
    with pytest.raises(ValueError, match="no"), span("outer"), span("inner"):
        raise ValueError("no")
    assert root is not None
    assert current_span.get() is root
    outer, inner = root.recording.spans[1:]
    assert (outer.parent, inner.parent) == (root, outer)
    assert outer.error == inner.error == "no"
    assert outer.ended_ns >= inner.ended_ns > 0


def test_a_recording_is_bounded() -> None:
    sink = Sink()
    root = Tracer(sink=sink).open("r", "id", {})
    assert root is not None
    for _ in range(MAX_SPANS + 9):
        root.child("one").end()
    root.end()
    [recording] = sink.kept
    assert (len(recording.spans), recording.num_dropped) == (MAX_SPANS, 10)
