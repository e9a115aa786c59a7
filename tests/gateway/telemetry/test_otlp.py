"""Metrics that are pushed arrive at a collector, over gRPC and HTTP, by the names of the GenAI conventions."""

import http.server
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from queue import Queue
from typing import Any, cast

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as messages
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as services
from opentelemetry.sdk.metrics.export import MetricExporter

from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.gateway.telemetry.otlp import OtlpPush, open_exporter
from sluice.pipelines.text.types import TextEvent
from sluice.record.spans import RemoteParent, remote_parent
from tests.waiting import PATIENCE_S

TRACE_ID, SPAN_ID = "ab" * 16, "cd" * 8
Received = Queue[Any]


@contextmanager
def grpc_collector(received: Received) -> Iterator[str]:
    class Collector(services.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.put(request)
            return messages.ExportMetricsServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    services.add_MetricsServiceServicer_to_server(Collector(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait(PATIENCE_S)


@contextmanager
def http_collector(received: Received) -> Iterator[str]:
    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/metrics"
            received.put(messages.ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Clock:
    """A clock that moves on by a tenth of a second at each look."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


def counted() -> GatewayMetrics:
    """Return metrics of an answered chat, which was traced, and of a failed completion."""
    metrics = GatewayMetrics(Clock())
    before = remote_parent.set(RemoteParent(int(TRACE_ID, 16), int(SPAN_ID, 16), is_sampled=True))
    record = metrics.open_request("rill", "openai_chat")
    record.observe(TextEvent("x", 1, 7, 1))
    record.observe(TextEvent("y", 2, 7, 3, FinishReason.STOP))
    record.close()
    remote_parent.reset(before)
    record = metrics.open_request("rill", "openai_completions")
    record.fail(SluiceError(ErrorCode.OVERLOADED, "full"))
    record.close()
    return metrics


def attributes(point: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in point.attributes}


@pytest.mark.parametrize(("protocol", "collector"), [("grpc", grpc_collector), ("http", http_collector)])
async def test_a_collector_receives_what_was_counted(protocol: str, collector: Callable[[Received], Any]) -> None:
    received: Received = Queue()
    with collector(received) as endpoint:
        push = OtlpPush(counted(), "gateway", open_exporter(endpoint, protocol), 3600.0)
        push.start()
        await push.close()  # pushes what was counted last
        request = received.get(timeout=PATIENCE_S)
    [resource] = request.resource_metrics
    about = attributes(resource.resource)
    assert (about["service.name"], about["sluice.process"]) == ("sluice", "gateway")
    assert about["service.instance.id"]
    metrics = {each.name: each for each in resource.scope_metrics[0].metrics}
    _check_durations(metrics["gen_ai.server.request.duration"])
    [ttft] = [each for each in metrics["gen_ai.server.time_to_first_token"].histogram.data_points if each.count]
    assert [(each.trace_id.hex(), each.span_id.hex()) for each in ttft.exemplars] == [(TRACE_ID, SPAN_ID)]
    usage = {
        attributes(each)["gen_ai.token.type"]: each.sum
        for each in metrics["gen_ai.client.token.usage"].histogram.data_points
        if each.count
    }
    assert usage == {"input": 7, "output": 3}
    chat = [each for each in metrics["sluice_tokens"].sum.data_points if attributes(each)["protocol"] == "openai_chat"]
    tokens = {attributes(each)["kind"]: each.as_double for each in chat}
    assert tokens == {"prompt": 7, "cached": 0, "generation": 3, "aborted": 0}
    assert metrics["sluice_requests"].sum.is_monotonic
    assert metrics["sluice_open_requests"].WhichOneof("data") == "gauge"
    assert not any(name.startswith("process_") for name in metrics)


def _check_durations(metric: Any) -> None:
    assert metric.unit == "s"
    points = {attributes(each).get("error.type", ""): each for each in metric.histogram.data_points if each.count}
    assert points.keys() == {"", "overloaded"}
    operations = {error: attributes(each)["gen_ai.operation.name"] for error, each in points.items()}
    assert operations == {"": "chat", "overloaded": "text_completion"}
    [answered] = [each for each in metric.histogram.data_points if each.count and "error.type" not in attributes(each)]
    assert attributes(answered)["gen_ai.request.model"] == "rill"
    assert sum(answered.bucket_counts) == 1
    assert len(answered.bucket_counts) == len(answered.explicit_bounds) + 1
    assert not answered.HasField("min")


async def test_a_collector_that_is_away_costs_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Absent:
        """An exporter whose collector does not answer."""

        def export(self, metrics_data: Any, timeout_millis: float = 0.0) -> Any:
            raise ConnectionError("nobody listens")

        def shutdown(self, timeout_millis: float = 0.0) -> None: ...

    push = OtlpPush(counted(), "gateway", cast(MetricExporter, Absent()), 3600.0)
    await push.push()
    await push.push()
    assert len([each for each in caplog.records if "do not reach" in each.message]) == 1
