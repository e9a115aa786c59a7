"""Spans on their way to a collector: over HTTP and gRPC, and where it is away."""

import logging
import socket
import threading

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from sluice.gateway.telemetry.tracer import Tracer
from sluice.record.otel import ExportSettings, TraceExport, make_exporter, make_resource
from sluice.record.spans import RemoteParent, current_span, remote_parent
from tests.otlp_receiver import running_receiver
from tests.waiting import PATIENCE_S

PARENT = RemoteParent(0xA1, 0xB2, True, "vendor=7")


def record(tracer: Tracer, num_children: int = 1) -> None:
    remote_parent.set(PARENT)
    root = tracer.open("request", "id-1", {"http.request.method": "POST"})
    assert root is not None
    for number in range(num_children):
        child = root.child("part", {"sluice.tokens": number, "names": ("a", "b")})
        child.note("first_token", {"n": 1})
        child.error = "it failed"
        child.end()
    root.end()
    current_span.set(None)
    remote_parent.set(None)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_collector_gets_every_span(protocol: str) -> None:
    with running_receiver() as receiver:
        url = receiver.http_url if protocol == "http" else receiver.grpc_url
        export = TraceExport(make_exporter(url), make_resource({"deployment": "test"}), ExportSettings(delay_s=0.01))
        record(Tracer(sink=export))
        await export.close()
        spans = receiver.wait_trace(f"{PARENT.trace_id:032x}")
    root, part = spans["request"], spans["part"]
    assert (root.parent_id, root.kind, root.is_failed) == (f"{PARENT.span_id:016x}", 2, False)
    assert (part.parent_id, part.kind, part.is_failed, part.events) == (root.span_id, 1, True, ["first_token"])
    assert part.attributes == {"sluice.tokens": 0, "names": ["a", "b"]}
    assert root.start_ns <= part.start_ns <= part.end_ns <= root.end_ns
    assert root.resource["service.name"] == "sluice"
    assert root.resource["deployment"] == "test"
    assert (export.num_exported, export.num_lost) == (2, 0)


async def test_a_collector_that_is_down_loses_spans_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        exporter = make_exporter(f"http://127.0.0.1:{taken.getsockname()[1]}")
        export = TraceExport(exporter, make_resource(), ExportSettings(max_batch_spans=2, delay_s=0.01), "there")
        tracer = Tracer(sink=export)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                record(tracer)
            exporter.shutdown()  # ends its tries, which take seconds
            await export.close()
    assert (export.num_exported, export.num_lost) == (0, 6)
    [line] = [each for each in caplog.records if each.name == "sluice.record.otel"]
    assert "spans for there are lost" in line.getMessage()


class HeldExporter(SpanExporter):
    """Takes nothing until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def export(self, spans: "list[ReadableSpan]") -> SpanExportResult:  # type: ignore[override]
        assert self.released.wait(PATIENCE_S)
        return SpanExportResult.SUCCESS


async def test_a_slow_collector_never_holds_a_request_up(caplog: pytest.LogCaptureFixture) -> None:
    exporter = HeldExporter()
    export = TraceExport(exporter, make_resource(), ExportSettings(max_queue_spans=6, max_batch_spans=2, delay_s=0.01))
    tracer = Tracer(sink=export)
    for _ in range(5):
        record(tracer)
    assert export.num_lost == 4
    exporter.released.set()
    await export.close()
    assert (export.num_exported, export.num_lost) == (6, 4)
    [family] = [each for each in tracer.collect() if each.name == "sluice_trace_spans_lost"]
    assert family.samples[0].value == 4
