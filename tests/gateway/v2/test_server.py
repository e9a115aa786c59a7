import json

import pytest
from tritonclient.grpc import service_pb2

from gateway.v2.repository import index_row
from gateway.v2.server import ServerIdentity, model_metadata, parse_version, server_metadata, statistics
from serving.repository.managed_model import IndexEntry, ModelState
from serving.request import LATEST, InferRequest
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError
from tests.gateway.grpc.parts import EchoModel, HeldModel

NO_TIME = {"count": 0, "ns": 0}


def test_the_server_as_triton_describes_itself() -> None:
    expected = (
        '{"name":"triton","version":"2.71.0","extensions":["classification","sequence","model_repository",'
        '"model_repository(unload_dependents)","schedule_policy","model_configuration","system_shared_memory",'
        '"cuda_shared_memory","binary_tensor_data","parameters","statistics","trace","logging"]}'
    )
    assert json.dumps(server_metadata(ServerIdentity("triton", "2.71.0")), separators=(",", ":")) == expected


async def test_a_model_that_batches_has_the_batch_in_its_shapes() -> None:
    described = model_metadata(EchoModel("add", "FP32", (4,), max_batch_size=8), [1, 2])
    assert list(described) == ["name", "versions", "platform", "inputs", "outputs"]
    assert described["versions"] == ["1", "2"]
    assert described["platform"] == "python"
    assert described["inputs"] == [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 4]}]
    assert described["outputs"] == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 4]}]


async def test_a_model_that_does_not_batch() -> None:
    described = model_metadata(EchoModel("text", "BYTES", (-1, 2)), [1])
    assert described["inputs"] == [{"name": "INPUT0", "datatype": "BYTES", "shape": [-1, 2]}]


def test_index_rows_have_what_there_is_to_say() -> None:
    assert index_row(IndexEntry("never")) == {"name": "never"}
    assert index_row(IndexEntry("good", 2, ModelState.READY)) == {"name": "good", "version": "2", "state": "READY"}
    failed = IndexEntry("bad", 1, ModelState.UNAVAILABLE, "because")
    assert index_row(failed) == {"name": "bad", "version": "1", "state": "UNAVAILABLE", "reason": "because"}


async def test_statistics_before_any_request() -> None:
    [described] = statistics([EchoModel()])["model_stats"]
    assert described == {
        "name": "echo",
        "version": "1",
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": dict.fromkeys(
            (
                "success",
                "fail",
                "queue",
                "compute_input",
                "compute_infer",
                "compute_output",
                "cache_hit",
                "cache_miss",
            ),
            NO_TIME,
        ),
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }


async def test_statistics_after_a_request_fit_protobuf_too() -> None:
    model = EchoModel(dims=(1,), max_batch_size=4)
    tensor = Tensor("INPUT0", "INT32", (2, 1), raw=bytes(8))
    model.submit(InferRequest({"INPUT0": tensor}), lambda response: None)
    described = statistics([model])
    [one] = described["model_stats"]
    assert (one["inference_count"], one["execution_count"]) == (2, 1)
    assert one["last_inference"] > 1_600_000_000_000
    assert [each["batch_size"] for each in one["batch_stats"]] == [2]
    assert list(one["batch_stats"][0]) == ["batch_size", "compute_input", "compute_infer", "compute_output"]
    message = service_pb2.ModelStatisticsResponse(**described)
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


async def test_statistics_of_what_is_not_there() -> None:
    with pytest.raises(SluiceError, match="requested model 'nope' is not available") as caught:
        statistics([EchoModel()], "nope")
    assert caught.value.code is ErrorCode.INVALID
    with pytest.raises(SluiceError, match="requested model version is not available for model 'echo'"):
        statistics([EchoModel()], "echo", 9)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("", LATEST),
        ("1", 1),
        ("01", 1),
        ("+1", 1),
        (" 1", 1),
        ("1x", 1),
        ("0x1", 0),
        ("0", 0),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_read_as_by_strtol(text: str, version: int) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize("text", ["abc", " ", "-", "x1", "9" * 23, str(2**63), "-" + "9" * 23, "١"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(SluiceError) as caught:
        parse_version(text)
    assert caught.value.code is ErrorCode.INVALID
    assert caught.value.message == (
        f"failed to get model version from specified version string '{text}' (details: stol), "
        "version should be an integral value > 0"
    )


@pytest.mark.parametrize("text", ["-1", "-5x"])
def test_negative_versions(text: str) -> None:
    with pytest.raises(SluiceError) as caught:
        parse_version(text)
    assert caught.value.message == (
        f"invalid model version specified '{text}' , version should be an integral value > 0"
    )
