"""A refused request leaves nothing that only the garbage collector could free."""

import gc
from collections.abc import Iterator

import pytest

from serving.job import InferJob
from serving.request import InferResponse
from sluice.errors import ErrorCode, SluiceError
from tests.gateway.grpc.parts import EchoModel
from tests.gateway.http.v2.small_server import small_server
from tests.gateway.v2.small_service import SmallService

BODY = {"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "INT32", "data": [1]}]}
ROUNDS = 20


def num_jobs() -> int:
    return sum(type(each) is InferJob for each in gc.get_objects())


class RefusingModel(EchoModel):
    def _start(self, job: InferJob) -> None:
        job.respond(InferResponse(error=SluiceError(ErrorCode.UNAVAILABLE, "not now")))


@pytest.fixture
def quiet_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_refused_request_leaves_nothing_behind(quiet_collector: None) -> None:
    before = num_jobs()
    with small_server(SmallService(RefusingModel("echo"))) as server:
        for _ in range(ROUNDS):
            assert server.post("/v2/models/echo/infer", BODY).status_code == 503
        assert num_jobs() - before <= 1
