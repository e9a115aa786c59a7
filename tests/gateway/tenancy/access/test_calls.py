"""What observers are told of the calls of every protocol."""

from collections.abc import Iterator
from queue import Queue
from typing import Any, cast

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from sluice.engine.config import EngineConfig
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.openai.encoders import EmbeddingRequest, write_vectors
from sluice.gateway.calls import Call, CallLog, CallObserver, hold_call
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.pipelines.encoding.encoder import Embeddings, TextEncoder
from tests.engine.in_process_client import InProcessEngineClient
from tests.gateway.answering import MODEL, Answering, answering
from tests.gateway.front.http.live import SteppedRunner
from tests.paths import RILL_TOKENIZER
from tests.waiting import PATIENCE_S

PROMPT = [5, 6, 7]
OPENAI = {"prompt": PROMPT, "max_tokens": 4}
TOO_MANY = SluiceError(ErrorCode.OVERLOADED, "too many", retry_after_s=3.0)


class Notes(CallObserver):
    """Keeps what it is told, and refuses what `refusal` names."""

    def __init__(self) -> None:
        self.ended: Queue[Call] = Queue()
        self.admitted: list[tuple[int, int]] = []
        self.refuses = ""
        self.runner: SteppedRunner

    async def begin(self, call: Call) -> None:
        assert call.ended == 0
        if self.refuses == "begin":
            raise TOO_MANY

    async def admit(self, call: Call, prompt_tokens: int, max_tokens: int) -> None:
        self.admitted.append((prompt_tokens, max_tokens))
        if self.refuses == "admit":
            raise TOO_MANY

    def end(self, call: Call) -> None:
        self.ended.put(call)

    def take(self) -> Call:
        call = self.ended.get(timeout=PATIENCE_S)
        assert self.ended.empty()
        return call


@pytest.fixture(scope="module")
def answers() -> Iterator[tuple[Answering, Notes]]:
    def make_engine() -> InProcessEngineClient:
        runner = notes.runner = SteppedRunner(256)
        return InProcessEngineClient(EngineConfig(model_path="none"), runner)

    notes = Notes()

    with answering(make_engine, RILL_TOKENIZER) as served:
        served.server.accounts.calls.observe(notes)
        yield served, notes


@pytest.fixture
def noted(answers: tuple[Answering, Notes]) -> Iterator[tuple[Answering, Notes]]:
    notes = answers[1]
    notes.admitted.clear()
    yield answers
    notes.refuses = ""
    assert notes.ended.empty()


def infer_request() -> Any:
    request = service_pb2.ModelInferRequest(model_name=MODEL, id="from-grpc")
    for name, value in (("input_ids", PROMPT), ("input_lengths", [len(PROMPT)]), ("request_output_len", [4])):
        tensor = request.inputs.add(name=name, datatype="INT32", shape=[len(value)])
        tensor.contents.int_contents.extend(value)
    return request


V2 = {"text_input": "a b", "max_tokens": 4}


@pytest.mark.parametrize(
    ("protocol", "operation", "ask"),
    [
        ("openai", "/v1/completions", lambda served: served.openai("/v1/completions", OPENAI)),
        ("openai", "/v1/completions", lambda served: served.openai("/v1/completions", {**OPENAI, "stream": True})),
        ("v2", f"/v2/models/{MODEL}/generate", lambda served: served.generate(V2)),
        ("v2", f"/v2/models/{MODEL}/generate_stream", lambda served: served.generate_stream({**V2, "stream": True})),
        ("grpc", "ModelInfer", lambda served: served.model_infer(infer_request())),
        ("grpc", "ModelStreamInfer", lambda served: served.model_stream_infer(infer_request())),
    ],
)
def test_a_call_has_what_it_used(noted: tuple[Answering, Notes], protocol: str, operation: str, ask: Any) -> None:
    served, notes = noted
    ask(served)
    call = notes.take()
    assert (call.protocol, call.operation, call.model, call.adapter) == (protocol, operation, MODEL, "")
    assert (call.generated_tokens, call.finish) == (4, "length")
    assert notes.admitted == [(call.prompt_tokens, 4)]
    assert 0 < call.started <= call.first_token <= call.ended
    assert call.source == "127.0.0.1"
    assert call.bytes_in > 20
    assert call.bytes_out > 20
    assert call.status == (0 if protocol == "grpc" else 200)
    assert call.request_id


def test_bytes_are_those_of_the_bodies(noted: tuple[Answering, Notes]) -> None:
    served, notes = noted
    body = b'{"model": "rill", "prompt": [5, 6], "max_tokens": 3, "stream": true}'
    answer = served.client.post("/v1/completions", content=body)
    call = notes.take()
    assert (call.bytes_in, call.bytes_out) == (len(body), len(answer.content))


@pytest.mark.parametrize("refuses", ["begin", "admit"])
def test_a_refusal_has_the_protocol_s_own_shape(noted: tuple[Answering, Notes], refuses: str) -> None:
    served, notes = noted
    notes.refuses = refuses
    answer = served.client.post("/v1/completions", json={"model": MODEL, **OPENAI, "stream": True})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert answer.json()["error"]["message"] == "too many"
    call = notes.take()
    assert (call.status, call.generated_tokens) == (429, 0)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    assert served.client.post("/v1/messages", json=chat).json()["error"]["type"] == "rate_limit_error"
    assert notes.take().status == 429
    assert served.generate(V2)[0] == 429
    assert notes.take().status == 429
    assert served.model_infer(infer_request()) == b"RESOURCE_EXHAUSTED: too many"
    assert notes.take().status == 8
    [answered] = served.stub.ModelStreamInfer(iter([infer_request()]), timeout=PATIENCE_S)
    assert answered.error_message == "too many"
    assert notes.take().status == 8


def test_requests_of_one_stream_are_calls_of_their_own(noted: tuple[Answering, Notes]) -> None:
    served, notes = noted
    assert len(list(served.stub.ModelStreamInfer(iter([infer_request()] * 3), timeout=PATIENCE_S))) >= 3
    calls = [notes.ended.get(timeout=PATIENCE_S) for _ in range(3)]
    assert [each.generated_tokens for each in calls] == [4, 4, 4]


def test_what_is_not_found_is_a_call_too(noted: tuple[Answering, Notes]) -> None:
    served, notes = noted
    assert served.client.post("/v1/completions", json={"model": "none", "prompt": "a"}).status_code == 404
    call = notes.take()
    assert (call.model, call.status, call.finish) == ("none", 404, "")


async def test_a_call_ends_once_and_after_everybody_who_holds_it() -> None:
    log, notes = CallLog(), Notes()
    log.observe(notes)
    call = log.open("openai", "/v1/responses", "id")
    with hold_call():
        call.release()
        assert notes.ended.empty()
    assert notes.take() is call
    record = GatewayMetrics().open_request("m", "p")
    record.close()
    call.release()
    assert notes.ended.empty()


async def test_texts_that_are_encoded_count() -> None:
    class Encoder:
        async def embed(self, inputs: Any, *arguments: Any, **options: Any) -> Embeddings:
            await options["admit"](9)
            return Embeddings(np.zeros((len(inputs), 2), np.float32), 7)

    notes, calls = Notes(), CallLog()
    calls.observe(notes)
    call = calls.open("openai", "/v1/embeddings", "id")
    fields = EmbeddingRequest.model_validate({"model": "m", "input": ["a", "b"]})
    await write_vectors(cast(TextEncoder, Encoder()), fields, {}, "embedding", "embedding")
    assert (call.prompt_tokens, notes.admitted) == (7, [(9, 0)])
