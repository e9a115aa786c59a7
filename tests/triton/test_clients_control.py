"""tritonclient's calls except inference: health, metadata, statistics, the repository, settings."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.server_process import ServerProcess
from tests.triton.clients import GRPC, Library

ONE = np.array([1], np.int32)
NINE_TIMES = b"""
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("OUTPUT0", 9 * x)]) for x in inputs]
"""


@pytest.fixture
def on_demand(client: Any) -> Iterator[str]:
    """Name of a model that is loaded by the test alone, and unloaded after it."""
    yield "on_demand"
    client.unload_model("on_demand")


def config_of(client: Any, library: Library, model: str) -> dict[str, Any]:
    answer: dict[str, Any] = library.ask(client, "get_model_config", model)
    return answer if library.name == "http" else answer["config"]


def index(client: Any, library: Library) -> dict[str, dict[str, Any]]:
    answer = library.ask(client, "get_model_repository_index")
    models = answer if library.name == "http" else answer["models"]
    return {model["name"]: model for model in models}


def executions(client: Any, library: Library, model: str) -> int:
    [statistics] = library.ask(client, "get_inference_statistics", model, "2")["model_stats"]
    return int(statistics["inference_stats"].get("success", {}).get("count", 0))


def test_health(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add_sub")
    assert client.is_model_ready("versioned", "2")
    assert not client.is_model_ready("versioned", "3")
    assert not client.is_model_ready("on_demand")


def test_server_metadata(client: Any, library: Library) -> None:
    metadata = library.ask(client, "get_server_metadata")
    assert metadata["name"] == "triton"
    assert {"classification", "sequence", "model_repository", "system_shared_memory", "binary_tensor_data"} <= set(
        metadata["extensions"]
    )


def test_model_metadata(client: Any, library: Library) -> None:
    metadata = library.ask(client, "get_model_metadata", "versioned")
    assert metadata["versions"] == ["1", "2"]
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["INPUT0"]
    assert metadata["outputs"][0]["datatype"] == "INT32"


def test_metadata_of_a_model_without_a_configuration(client: Any, library: Library) -> None:
    metadata = library.ask(client, "get_model_metadata", "scale")
    assert metadata["platform"] == "onnxruntime_onnx"
    [tensor] = metadata["inputs"]
    assert (tensor["name"], tensor["datatype"], [int(size) for size in tensor["shape"]]) == ("X", "FP32", [-1, 4])


def test_model_config(client: Any, library: Library) -> None:
    config = config_of(client, library, "add_sub")
    assert (config["backend"], config["max_batch_size"]) == ("python", 8)
    assert config["dynamic_batching"]["preferred_batch_size"] == [4, 8]


def test_statistics_count_requests(client: Any, library: Library) -> None:
    before = executions(client, library, "versioned")
    client.infer("versioned", [library.tensor("INPUT0", ONE)])
    assert executions(client, library, "versioned") == before + 1


def test_load_and_unload(client: Any, library: Library, on_demand: str) -> None:
    assert index(client, library)[on_demand].get("state") != "READY"
    client.load_model(on_demand)
    assert client.is_model_ready(on_demand)
    assert index(client, library)[on_demand]["state"] == "READY"
    assert client.infer(on_demand, [library.tensor("INPUT0", ONE)]).as_numpy("OUTPUT0").tolist() == [1]
    client.unload_model(on_demand)
    assert not client.is_model_ready(on_demand)
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.infer(on_demand, [library.tensor("INPUT0", ONE)])


def test_load_with_a_configuration(client: Any, library: Library, on_demand: str) -> None:
    tensor = {"data_type": "TYPE_INT32", "dims": [-1]}
    config = {
        "backend": "python",
        "max_batch_size": 16,
        "input": [{"name": "INPUT0", **tensor}],
        "output": [{"name": "OUTPUT0", **tensor}],
    }
    client.load_model(on_demand, config=json.dumps(config))
    assert config_of(client, library, on_demand)["max_batch_size"] == 16
    rows = np.array([[1, 2], [3, 4]], np.int32)
    result = client.infer(on_demand, [library.tensor("INPUT0", rows)])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), rows)


def test_load_with_a_file(client: Any, library: Library, on_demand: str) -> None:
    tensor = {"data_type": "TYPE_INT32", "dims": [-1]}
    config = {
        "backend": "python",
        "input": [{"name": "INPUT0", **tensor}],
        "output": [{"name": "OUTPUT0", **tensor}],
    }
    client.load_model(on_demand, config=json.dumps(config), files={"file:7/model.py": NINE_TIMES})
    result = client.infer(on_demand, [library.tensor("INPUT0", ONE)])
    assert (result.as_numpy("OUTPUT0").tolist(), result.get_response(**library.as_json)["model_version"]) == ([9], "7")


def test_trace_settings(client: Any, library: Library) -> None:
    def settings(method: str, *arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = library.ask(client, method, *arguments)
        if library.name == "http":
            return answer
        values = {name: setting.get("value", []) for name, setting in answer["settings"].items()}
        return {name: value if name == "trace_level" else "".join(value) for name, value in values.items()}

    usual = settings("get_trace_settings")
    changed = settings("update_trace_settings", "add_sub", {"trace_rate": "7", "trace_count": "3"})
    assert (changed["trace_rate"], changed["trace_count"]) == ("7", "3")
    assert settings("get_trace_settings", "add_sub") == changed
    assert settings("get_trace_settings") == usual
    assert settings("update_trace_settings", "add_sub", {"trace_rate": None, "trace_count": None}) == usual


def test_log_settings(client: Any, library: Library) -> None:
    def verbosity(method: str, *arguments: Any) -> int:
        answer = library.ask(client, method, *arguments)
        if library.name == "http":
            return int(answer["log_verbose_level"])
        return int(answer["settings"]["log_verbose_level"].get("uint32_param", 0))

    assert verbosity("get_log_settings") == 0
    assert verbosity("update_log_settings", {"log_verbose_level": 2}) == 2
    assert verbosity("get_log_settings") == 2
    assert verbosity("update_log_settings", {"log_verbose_level": 0}) == 0


def test_python_models_load_over_grpc_again_and_again(triton: ServerProcess) -> None:
    """gRPC's fork handlers once killed most of the workers that started while a call was served."""
    tensor = {"data_type": "TYPE_INT32", "dims": ["-1"]}
    config = {
        "backend": "python",
        "input": [{"name": "INPUT0", **tensor}],
        "output": [{"name": "OUTPUT0", **tensor}],
        "instance_group": [{"count": 3, "kind": "KIND_CPU"}],
    }
    with GRPC.client(triton) as client:
        for _ in range(5):
            client.load_model("on_demand", config=json.dumps(config))
            client.unload_model("on_demand")
