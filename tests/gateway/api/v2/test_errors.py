"""One table from error codes to the statuses of both protocols, checked on every wire that an inference has."""

from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.grpc.methods import GRPC_CODE
from sluice.gateway.api.v2.http.exchange import V2_STATUS
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from tests.gateway.api.v2.grpc.parts import FunctionModel
from tests.gateway.api.v2.ports import both_ports
from tests.gateway.api.v2.small_service import SmallService
from tests.waiting import PATIENCE_S

STATUSES = {
    ErrorCode.INVALID: (400, "INVALID_ARGUMENT"),
    ErrorCode.UNAUTHENTICATED: (401, "UNAUTHENTICATED"),
    ErrorCode.FORBIDDEN: (403, "PERMISSION_DENIED"),
    ErrorCode.NOT_FOUND: (404, "NOT_FOUND"),
    ErrorCode.METHOD_NOT_ALLOWED: (405, "UNIMPLEMENTED"),
    ErrorCode.TOO_LARGE: (400, "RESOURCE_EXHAUSTED"),
    ErrorCode.UNIMPLEMENTED: (501, "UNIMPLEMENTED"),
    ErrorCode.ALREADY_EXISTS: (400, "ALREADY_EXISTS"),
    ErrorCode.CANCELLED: (400, "CANCELLED"),
    ErrorCode.OVERLOADED: (429, "RESOURCE_EXHAUSTED"),
    ErrorCode.UNAVAILABLE: (503, "UNAVAILABLE"),
    ErrorCode.DEADLINE: (504, "DEADLINE_EXCEEDED"),
    ErrorCode.INTERNAL: (500, "INTERNAL"),
    ErrorCode.UNKNOWN: (400, "UNKNOWN"),
}
PATH = "/v2/models/failing/infer"
BODY = {"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "INT32", "data": [0]}]}


class Failing(FunctionModel):
    """Fails as the test says, and has a secret."""

    def __init__(self) -> None:
        super().__init__("failing", self._fail)
        self.error = SluiceError(ErrorCode.INTERNAL, "")
        self.is_unexpected = False

    def _fail(self, job: InferJob) -> None:
        if self.is_unexpected:
            raise ZeroDivisionError("a secret")
        job.fail(self.error)


class Wires:
    """An inference of `model`, over each wire."""

    def __init__(self, model: Failing, client: httpx.Client, channel: Any) -> None:
        self.model, self.client = model, client
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.request = service_pb2.ModelInferRequest(model_name="failing", raw_input_contents=[bytes(4)])
        self.request.inputs.add(name="INPUT0", datatype="INT32", shape=[1])

    def over_http(self) -> httpx.Response:
        return self.client.post(PATH, json=BODY)

    def over_grpc(self) -> Any:
        with pytest.raises(grpc.RpcError) as caught:
            self.stub.ModelInfer(self.request, timeout=PATIENCE_S)
        return caught.value

    def on_a_stream(self) -> str:
        [message] = self.stub.ModelStreamInfer(iter([self.request]), timeout=PATIENCE_S)
        return str(message.error_message)


@pytest.fixture(
    scope="module", params=[(True, "sluice"), (False, "grpcio")], ids=["direct", "by the application and grpcio"]
)
def wires(request: pytest.FixtureRequest) -> Iterator[Wires]:
    model = Failing()
    models: list[Model] = [model]
    with (
        both_ports(SmallService(*models), is_direct=request.param[0], grpc_server=request.param[1]) as (url, address),
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
        grpc.insecure_channel(address) as channel,
    ):
        yield Wires(model, client, channel)


def test_the_tables_are_whole() -> None:
    assert {code: (V2_STATUS[code], GRPC_CODE[code].name) for code in ErrorCode} == STATUSES


@pytest.mark.parametrize("code", STATUSES)
def test_a_model_s_error(wires: Wires, code: ErrorCode) -> None:
    wires.model.error, wires.model.is_unexpected = SluiceError(code, f"failed as {code}"), False
    answer, error = wires.over_http(), wires.over_grpc()
    assert (answer.status_code, error.code().name) == STATUSES[code]
    assert answer.json() == {"error": f"failed as {code}"}
    assert answer.headers["content-type"] == "application/json"
    assert error.details() == wires.on_a_stream() == f"failed as {code}"


def test_when_to_try_again(wires: Wires) -> None:
    wires.model.error, wires.model.is_unexpected = SluiceError(ErrorCode.OVERLOADED, "", retry_after_s=2.5), False
    assert wires.over_http().headers["retry-after"] == "3"
    assert dict(wires.over_grpc().trailing_metadata())["grpc-retry-pushback-ms"] == "2500"


def test_what_nobody_expected_is_told_without_its_text(wires: Wires, caplog: pytest.LogCaptureFixture) -> None:
    wires.model.is_unexpected = True
    answer, error = wires.over_http(), wires.over_grpc()
    assert (answer.status_code, error.code().name) == STATUSES[ErrorCode.INTERNAL]
    for text in (answer.text, error.details(), wires.on_a_stream()):
        assert text and "secret" not in text
    assert error.details().rsplit(" ", 1)[1] in caplog.text and "a secret" in caplog.text
