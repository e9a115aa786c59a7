"""Both protocols describe models in the same way, where the recorded answers do not show it."""

import json

import pytest
from tritonclient.grpc import service_pb2

from sluice.errors import ErrorCode
from sluice.gateway.api.v2.server import parse_version, server_metadata, statistics
from sluice.serving.request import LATEST, InferRequest
from sluice.serving.tensors.tensor import Tensor
from tests.errors import error_of
from tests.gateway.api.v2.grpc.parts import EchoModel, HeldModel


def test_the_server_as_triton_describes_itself() -> None:
    expected = (
        '{"name":"triton","version":"2.71.0","extensions":["classification","sequence","model_repository",'
        '"model_repository(unload_dependents)","schedule_policy","model_configuration","system_shared_memory",'
        '"cuda_shared_memory","binary_tensor_data","parameters","statistics","trace","logging"]}'
    )
    assert json.dumps(server_metadata("triton"), separators=(",", ":")) == expected


async def test_statistics_before_any_request_and_after_one() -> None:
    model = EchoModel(dims=(1,), max_batch_size=4)
    kinds = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
    [described] = statistics([model])["model_stats"]
    assert described == {
        "name": "echo",
        "version": "1",
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": {kind: {"count": 0, "ns": 0} for kind in kinds},
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }
    tensor = Tensor("INPUT0", "INT32", (2, 1), raw=bytes(8))
    model.submit(InferRequest({"INPUT0": tensor}), lambda response: None)
    [one] = statistics([model])["model_stats"]
    assert (one["inference_count"], one["execution_count"]) == (2, 1)
    assert one["last_inference"] > 1_600_000_000_000
    assert [each["batch_size"] for each in one["batch_stats"]] == [2]
    message = service_pb2.ModelStatisticsResponse(model_stats=[one])
    assert message.model_stats[0].inference_stats.success.count == 1
    assert message.model_stats[0].batch_stats[0].compute_infer.ns == one["batch_stats"][0]["compute_infer"]["ns"]


async def test_responses_of_decoupled_models_by_their_place() -> None:
    model = HeldModel(is_decoupled=True)
    tensor = Tensor("INPUT0", "INT32", (1,), raw=bytes(4))
    model.submit(InferRequest({"INPUT0": tensor}, id="r"), lambda response: None)
    model.send("r", 1)
    model.send("r", 2)
    model.send("r", is_final=True)
    [described] = statistics([model])["model_stats"]
    assert list(described["response_stats"]) == ["0", "1", "2"]
    assert described["response_stats"]["2"]["empty_response"]["count"] == 1
    message = service_pb2.ModelStatisticsResponse(model_stats=[described])
    assert message.model_stats[0].response_stats["1"].success.count == 1


async def test_statistics_of_some() -> None:
    models = [EchoModel("b"), EchoModel("a", version=2), EchoModel("a", version=1)]

    def asked(name: str = "", version: int = -1) -> list[tuple[str, str]]:
        return [(each["name"], each["version"]) for each in statistics(models, name, version)["model_stats"]]

    assert asked() == [("a", "1"), ("a", "2"), ("b", "1")]
    assert asked("a") == [("a", "1"), ("a", "2")]
    assert asked("a", 2) == [("a", "2")]
    for arguments, text in (
        (("nope",), "requested model 'nope' is not available"),
        (("b", 9), "requested model version is not available for model 'b'"),
    ):
        error = error_of(asked, *arguments)
        assert (error.code, error.message) == (ErrorCode.INVALID, text)


OUGHT = "version should be an integral value > 0"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        *(("", LATEST), ("1", 1), ("01", 1), ("+1", 1), (" 1", 1), ("1x", 1), ("0x1", 0), ("0", 0)),
        (str(2**63 - 1), 2**63 - 1),
        *((each, None) for each in ("abc", " ", "-", "x1", "9" * 23, str(2**63), "-" + "9" * 23, "١", "-1", "-5x")),
    ],
)
def test_versions_are_read_as_by_strtol(text: str, version: int | None) -> None:
    if version is not None:
        assert parse_version(text) == version
        return
    refused = f"failed to get model version from specified version string '{text}' (details: stol), {OUGHT}"
    negative = f"invalid model version specified '{text}' , {OUGHT}"
    error = error_of(parse_version, text)
    assert (error.code, error.message) == (ErrorCode.INVALID, negative if text in ("-1", "-5x") else refused)
