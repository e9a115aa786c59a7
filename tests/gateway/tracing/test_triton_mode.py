"""Triton's trace mode `opentelemetry`."""

import secrets

from gateway.options.config import read_config
from gateway.tracing.tracer import remote_parent
from gateway.v2.trace import TraceSetting, TraceSettings
from gateway.v2.trace_spans import TracesAsSpans
from serving.request import InferRequest
from sluice.spans import Recording, RemoteParent, Span
from tests.gateway.tracing.test_tracer import Sink
from tests.otlp_receiver import running_receiver
from tests.server_process import StartServer
from tests.serving.backends.ensemble.parts import FunctionModel, simple_config

PARENT = RemoteParent(0xA1, 0xB2, True)


def settings(sink: Sink, **setting: object) -> TraceSettings:
    levels = frozenset({"TIMESTAMPS"})
    return TraceSettings("", TraceSetting(levels, **setting), TracesAsSpans(sink, {"url": "http://x"}))  # type: ignore[arg-type]


def trace_one(own: TraceSettings) -> None:
    trace = own.begin(FunctionModel(simple_config("one"), lambda X: {"Y": X}), InferRequest({}, id="r7"))
    if trace is None:
        return
    names = ("HTTP_RECV_START", "REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END")
    for number, name in enumerate((*names, "COMPUTE_OUTPUT_START", "COMPUTE_END", "REQUEST_END", "HTTP_SEND_END"), 1):
        trace.capture(name, number * 100)
    trace.finish()


def _names(span: Span) -> list[str]:
    return [each.name for each in span.events]


def describe(recording: Recording) -> list[tuple[str, str, int, int, list[str]]]:
    return [
        (
            each.name,
            each.parent.name if each.parent else "",
            each.started_ns,
            each.ended_ns,
            [e.name for e in each.events],
        )
        for each in recording.spans
    ]


async def test_a_trace_is_three_spans_with_tritons_events() -> None:
    sink = Sink()
    trace_one(settings(sink, rate=1))
    [recording] = sink.kept
    computing = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
    assert describe(recording) == [
        ("InferRequest", "", 100, 900, ["HTTP_RECV_START", "HTTP_SEND_END"]),
        ("one", "InferRequest", 200, 800, ["REQUEST_START", "QUEUE_START", "REQUEST_END"]),
        ("compute", "one", 400, 700, computing),
    ]
    assert recording.root.attributes == {
        "triton.model_name": "one",
        "triton.model_version": 1,
        "triton.trace_id": 1,
        "triton.trace_parent_id": 0,
        "triton.request_id": "r7",
    }


async def test_a_request_with_a_context_is_traced_whatever_the_rate() -> None:
    sink = Sink()
    own = settings(sink, rate=0)
    assert own.is_on
    trace_one(own)
    token = remote_parent.set(PARENT)
    trace_one(own)
    remote_parent.reset(token)
    [recording] = sink.kept
    assert (recording.trace_id, recording.parent) == (PARENT.trace_id, PARENT)


def test_the_settings_name_the_mode_and_levels_can_be_changed_without_a_file() -> None:
    own = settings(Sink(), rate=1)
    own.update({"trace_level": ["OFF"]})
    assert not own.is_on
    own.update({"trace_level": ["TIMESTAMPS"], "trace_rate": "3"}, "one")
    assert own.get("one") == {
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": "3",
        "trace_count": "-1",
        "trace_mode": "opentelemetry",
        "url": "http://x",
    }


def test_the_options_of_the_mode() -> None:
    texts = ["mode=opentelemetry", "opentelemetry,url=http://c:4318/v1/traces", "opentelemetry,resource=a=b=c"]
    found = read_config({"--trace-config": [*texts, "opentelemetry,bsp_schedule_delay=50"]}, {}).trace
    assert (found.mode, found.url, found.resource) == ("opentelemetry", "http://c:4318/v1/traces", {"a": "b=c"})
    assert (found.otel_number("bsp_schedule_delay", 1), found.otel_number("bsp_max_queue_size", 7)) == (50, 7)


def test_a_server_sends_what_clients_switch_on(start_server: StartServer) -> None:
    with running_receiver() as receiver:
        own = [f"opentelemetry,url={receiver.http_url}/v1/traces", "opentelemetry,resource=service.name=mine"]
        texts = ["mode=opentelemetry", "opentelemetry,bsp_schedule_delay=50", "rate=1", *own]
        server = start_server(*(f"--trace-config={each}" for each in texts), "--timeline-requests=0")
        trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
        body, headers = {"text_input": "a", "max_tokens": 2}, {"traceparent": f"00-{trace_id}-{span_id}-01"}
        with server.client() as client:
            assert client.post("/v2/models/tiny/generate", json=body).status_code == 200
            changed = client.post("/v2/trace/setting", json={"trace_level": ["TIMESTAMPS"]}).json()
            assert (changed["trace_mode"], changed["trace_level"]) == ("opentelemetry", ["TIMESTAMPS"])
            assert client.post("/v2/models/tiny/generate", json=body, headers=headers).status_code == 200
        root = receiver.wait_trace(trace_id)["InferRequest"]
    assert (root.parent_id, root.resource["service.name"]) == (span_id, "mine")
    assert {each.trace_id for each in receiver.spans} == {trace_id}
    assert root.events == ["INFER_RESPONSE_COMPLETE"]
