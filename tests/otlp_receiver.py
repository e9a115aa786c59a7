"""A collector of traces that receives OTLP over HTTP and gRPC, and keeps what it gets."""

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan

from tests.waiting import PATIENCE_S


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came, with its resource's attributes."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[str]
    is_failed: bool
    resource: dict[str, Any]


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind or "string_value")


def _attributes(pairs: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in pairs}


def _read_span(span: WireSpan, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        [each.name for each in span.events],
        span.status.code == 2,
        resource,
    )


@dataclass
class OtlpReceiver:
    """What has come, and where to send it."""

    http_url: str = ""
    grpc_url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, request: Any) -> None:
        """Keep the spans of a message."""
        with self._changed:
            for group in request.resource_spans:
                resource = _attributes(group.resource.attributes)
                self.spans += [_read_span(each, resource) for scope in group.scope_spans for each in scope.spans]
            self._changed.notify_all()

    def wait_trace(self, trace_id: str) -> dict[str, ReceivedSpan]:
        """Return the spans of a trace by name, once its root is there: they come in one message."""

        def find() -> list[ReceivedSpan]:
            return [each for each in self.spans if each.trace_id == trace_id]

        with self._changed:
            assert self._changed.wait_for(lambda: bool(find()), PATIENCE_S), "no span came"
            return {each.name: each for each in find()}


class _Service(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:
        self._receiver.take(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def _http_handler(receiver: OtlpReceiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
            receiver.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    return Handler


@contextmanager
def running_receiver() -> Iterator[OtlpReceiver]:
    """Receive on free ports of this machine."""
    receiver = OtlpReceiver()
    http = ThreadingHTTPServer(("127.0.0.1", 0), _http_handler(receiver))
    serving = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    serving.start()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Service(receiver), server)  # type: ignore[no-untyped-call]
    receiver.grpc_url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    receiver.http_url = f"http://127.0.0.1:{http.server_address[1]}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0).wait()
        http.shutdown()
        http.server_close()
        serving.join()
