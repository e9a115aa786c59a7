"""Traces of a real server: what a collector gets of requests over HTTP and gRPC."""

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.otlp_receiver import OtlpReceiver, running_receiver
from tests.server_process import ServerProcess, running_server
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with running_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def traced(
    checkpoint: Path, receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    flags = (f"--otlp-traces-endpoint={receiver.http_url}", "--trace-export-delay-ms=50", "--trace-sample-rate=0")
    with running_server(checkpoint, tmp_path_factory.mktemp("traced") / "log", *flags) as running:
        running.wait_ready()
        yield running


def parent() -> tuple[str, str, dict[str, str]]:
    """A trace id, a span id, and the headers that name them."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, {"traceparent": f"00-{trace_id}-{span_id}-01", "tracestate": "vendor=1"}


def test_a_chat_is_traced_from_its_head_to_its_last_token(traced: ServerProcess, receiver: OtlpReceiver) -> None:
    trace_id, span_id, headers = parent()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 8}
    with traced.client() as client:
        answer = client.post("/v1/chat/completions", json={**body, "stream": True, "ignore_eos": True}, headers=headers)
    assert answer.status_code == 200
    spans = receiver.wait_trace(trace_id)
    root, chat = spans["POST /v1/chat/completions"], spans["chat tiny"]
    assert root.parent_id == span_id
    assert root.attributes["sluice.request_id"] == answer.headers["x-request-id"]
    assert root.attributes["http.response.status_code"] == 200
    assert chat.attributes["gen_ai.operation.name"] == "chat"
    assert chat.attributes["gen_ai.request.max_tokens"] == chat.attributes["gen_ai.usage.output_tokens"] == 8
    assert chat.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert chat.events == ["first_token"]
    assert spans["tokenize"].attributes["sluice.tokens"] == chat.attributes["gen_ai.usage.input_tokens"]
    parents = {name: each.parent_id for name, each in spans.items()}
    assert parents["chat tiny"] == root.span_id
    assert parents["tokenize"] == parents["queue"] == parents["prefill"] == parents["decode"] == chat.span_id
    assert root.events == ["received", "response_start"]
    order = ["tokenize", "queue", "prefill", "decode"]
    starts = [spans[name].start_ns for name in order]
    assert starts == sorted(starts)
    assert spans["decode"].end_ns <= chat.end_ns <= root.end_ns
    with traced.client() as client:
        page = client.get(f"{traced.metrics_url}").text
    assert "sluice_trace_spans_lost_total 0" in page


def test_requests_of_a_grpc_stream_have_the_parent_of_its_metadata(
    traced: ServerProcess, receiver: OtlpReceiver
) -> None:
    trace_id, span_id, headers = parent()
    texts = triton.InferInput("text_input", [1], "BYTES")
    texts.set_data_from_numpy(np.array([b"hello"], np.object_))
    most = triton.InferInput("max_tokens", [1], "INT32")
    most.set_data_from_numpy(np.array([3], np.int32))
    answered = threading.Event()
    with triton.InferenceServerClient(traced.grpc_address) as client:
        client.start_stream(lambda result, error: answered.set(), headers=headers)
        client.async_stream_infer("tiny", [texts, most], request_id="mine")
        assert answered.wait(PATIENCE_S)
    spans = receiver.wait_trace(trace_id)
    root = spans["inference.GRPCInferenceService/ModelStreamInfer"]
    assert (root.parent_id, root.attributes["sluice.request_id"]) == (span_id, "mine")
    assert root.attributes["rpc.grpc.status_code"] == 0
    assert spans["infer tiny"].parent_id == root.span_id
    assert spans["text_completion tiny"].parent_id == spans["infer tiny"].span_id


def test_a_refused_request_is_traced_with_its_status(traced: ServerProcess, receiver: OtlpReceiver) -> None:
    trace_id, _, headers = parent()
    with traced.client() as client:
        assert client.post("/v1/completions", json={"model": "tiny"}, headers=headers).status_code == 400
    root = receiver.wait_trace(trace_id)["POST /v1/completions"]
    assert (root.attributes["http.response.status_code"], root.is_failed) == (400, False)


def test_what_no_client_traces_is_not_sent_at_a_rate_of_zero(traced: ServerProcess, receiver: OtlpReceiver) -> None:
    trace_id, _, headers = parent()
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    with traced.client() as client:
        untraced = client.post("/v1/completions", json=body)
        client.post("/v1/completions", json=body, headers=headers)
    receiver.wait_trace(trace_id)
    assert untraced.headers["x-request-id"] not in {each.attributes.get("sluice.request_id") for each in receiver.spans}


def test_a_crash_of_the_engine_is_in_the_trace(traced: ServerProcess, receiver: OtlpReceiver) -> None:
    trace_id, _, headers = parent()
    body = {"model": "tiny", "prompt": "a story", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with traced.client() as client, client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
        traced.engine().kill()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    spans = receiver.wait_trace(trace_id)
    assert spans["decode"].events == ["engine_lost", "resubmitted"]
    named = [each.name for each in receiver.spans if each.trace_id == trace_id]
    assert named.count("queue") == named.count("prefill") == 2
