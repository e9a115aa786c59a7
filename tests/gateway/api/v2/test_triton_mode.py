"""Triton's trace mode `opentelemetry`."""

import json
import secrets
from pathlib import Path

from sluice.gateway.api.v2.trace import find_steps, following
from sluice.gateway.api.v2.trace_settings import TraceSetting, TraceSettings
from sluice.gateway.options.config import read_config
from sluice.record.spans import Recording, RemoteParent, Span, current_span, format_traceparent, remote_parent
from sluice.serving.request import InferRequest
from tests.gateway.api.v2.grpc.parts import EchoModel, infer_request, serving
from tests.gateway.api.v2.small_service import SmallService
from tests.gateway.telemetry.test_tracer import Sink
from tests.otlp_receiver import running_receiver
from tests.server_process import StartServer
from tests.serving.backends.builders import Lookup
from tests.serving.backends.ensemble.parts import (
    Caller,
    FunctionModel,
    ensemble_config,
    load,
    request,
    simple_config,
)

PARENT = RemoteParent(0xA1, 0xB2, True)


def settings(sink: Sink, **setting: object) -> TraceSettings:
    levels = frozenset({"TIMESTAMPS"})
    return TraceSettings("", TraceSetting(levels, **setting), sink, {"url": "http://x"})  # type: ignore[arg-type]


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


async def test_a_plain_call_of_grpc_brings_its_context() -> None:
    sink = Sink()
    header = format_traceparent(PARENT.trace_id, PARENT.span_id, is_sampled=True)
    async with serving(SmallService(EchoModel(), trace=settings(sink, rate=0))) as running:
        await running.stub.ModelInfer(infer_request("echo", 1))
        await running.stub.ModelInfer(infer_request("echo", 1), metadata=(("traceparent", header),))
        await running.stub.ModelInfer(infer_request("echo", 1))
    assert [each.parent for each in sink.kept] == [PARENT]


async def submit_nested(own: TraceSettings) -> None:
    """Run a traced ensemble `whole` of `one` and of the ensemble `inner`, which has `two`."""
    models = Lookup(
        FunctionModel(simple_config("one"), lambda X: {"Y": X + 1}),
        FunctionModel(simple_config("two"), lambda X: {"Y": X * 2}),
    )
    inner = ensemble_config("two: X=a -> Y=z")
    inner.name = "inner"
    await load(inner, models)
    whole = await load(ensemble_config("one: X=a -> Y=b; inner: a=b -> z=z"), models)
    asked = request(id="r8")
    trace = own.begin(whole, asked)
    assert trace is not None
    with following(trace):
        caller = Caller(whole, asked)
    assert current_span.get() is None
    assert caller.values() == [4.0]
    trace.capture_job(caller.job)
    trace.finish()


async def test_the_steps_of_an_ensemble_have_spans_within_its_own() -> None:
    sink = Sink()
    await submit_nested(settings(sink, rate=1))
    [recording] = sink.kept
    nested = [(each.name, each.parent.name if each.parent else "") for each in recording.spans]
    assert nested == [
        ("InferRequest", ""),
        ("whole", "InferRequest"),
        ("one", "whole"),
        ("inner", "whole"),
        ("two", "inner"),
    ]
    _, *models = recording.spans
    numbers = {
        each.name: (each.attributes["triton.trace_id"], each.attributes["triton.trace_parent_id"]) for each in models
    }
    assert numbers == {"whole": (1, 0), "one": (2, 1), "inner": (3, 1), "two": (4, 3)}
    for each in models:
        assert [event.name for event in each.events] == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
        assert each.parent is not None and each.parent.started_ns <= each.started_ns <= each.ended_ns
    assert models[0].attributes["triton.request_id"] == "r8"


async def test_tritons_json_names_the_trace_that_a_step_belongs_to(tmp_path: Path) -> None:
    own = TraceSettings(str(tmp_path / "trace"), TraceSetting(frozenset({"TIMESTAMPS"}), 1))
    await submit_nested(own)
    own.close()
    records = json.loads((tmp_path / "trace").read_text())
    heads = [each for each in records if "model_name" in each]
    assert heads == [
        {"id": 1, "model_name": "whole", "model_version": 1, "request_id": "r8"},
        {"id": 2, "model_name": "one", "model_version": 1, "parent_id": 1},
        {"id": 3, "model_name": "inner", "model_version": 1, "parent_id": 1},
        {"id": 4, "model_name": "two", "model_version": 1, "parent_id": 3},
    ]
    points = [each["timestamps"][0]["name"] for each in records if each["id"] == 4 and "timestamps" in each]
    assert points == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]


async def test_a_step_with_instances_has_its_computation() -> None:
    recording = Recording("steps", "", {}, lambda _: None)
    job = recording.root.child("infer whole", {"sluice.model": "whole", "sluice.model_version": 1}, 100)
    step = job.child("infer one", {"sluice.model": "one", "sluice.model_version": 3}, 200)
    for name, began, ended in (("queue", 200, 300), ("compute_input", 300, 400), ("compute_infer", 400, 500)):
        step.child(name, started_ns=began).end(ended)
    step.child("compute_output", started_ns=500).end(600)
    step.end(700)
    recording.root.child("infer another", {"sluice.model": "another", "sluice.model_version": 1})
    [found] = find_steps(job, 7, lambda: 8)
    assert found[:4] == (8, 7, "one", 3)
    assert [event[:2] for event in found.events] == [
        ("REQUEST_START", 200),
        ("QUEUE_START", 200),
        ("COMPUTE_START", 300),
        ("COMPUTE_INPUT_END", 400),
        ("COMPUTE_OUTPUT_START", 500),
        ("COMPUTE_END", 600),
        ("REQUEST_END", 700),
    ]


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
