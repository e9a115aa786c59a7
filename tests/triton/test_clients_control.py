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


def on_demand_config(**more: Any) -> str:
    tensor = {"data_type": "TYPE_INT32", "dims": ["-1"]}
    sides = {"input": [{"name": "INPUT0", **tensor}], "output": [{"name": "OUTPUT0", **tensor}]}
    return json.dumps({"backend": "python", **sides, **more})


@pytest.fixture
def on_demand(client: Any) -> Iterator[str]:
    """Name of a model that is loaded by the test alone, and unloaded after it."""
    yield "on_demand"
    client.unload_model("on_demand")


def config_of(client: Any, library: Library, model: str) -> dict[str, Any]:
    answer: dict[str, Any] = library.ask(client, "get_model_config", model)
    return answer if library.name == "http" else answer["config"]


def state(client: Any, library: Library, model: str) -> str | None:
    answer = library.ask(client, "get_model_repository_index")
    models = answer if library.name == "http" else answer["models"]
    return next((each.get("state") for each in models if each["name"] == model), None)


def executions(client: Any, library: Library, model: str) -> int:
    [statistics] = library.ask(client, "get_inference_statistics", model, "2")["model_stats"]
    return int(statistics["inference_stats"].get("success", {}).get("count", 0))


def test_what_only_asks(client: Any, library: Library) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("versioned", "2") and not client.is_model_ready("versioned", "3")
    assert not client.is_model_ready("on_demand")
    assert library.ask(client, "get_server_metadata")["name"] == "triton"
    assert library.ask(client, "get_model_metadata", "versioned")["versions"] == ["1", "2"]
    config = config_of(client, library, "add_sub")
    assert (config["backend"], config["dynamic_batching"]["preferred_batch_size"]) == ("python", [4, 8])
    before = executions(client, library, "versioned")
    client.infer("versioned", [library.tensor("INPUT0", ONE)])
    assert executions(client, library, "versioned") == before + 1


def test_load_and_unload(client: Any, library: Library, on_demand: str) -> None:
    inputs = [library.tensor("INPUT0", ONE)]
    assert state(client, library, on_demand) != "READY"
    client.load_model(on_demand)
    assert client.is_model_ready(on_demand) and state(client, library, on_demand) == "READY"
    assert client.infer(on_demand, inputs).as_numpy("OUTPUT0").tolist() == [1]
    client.load_model(on_demand, config=on_demand_config(max_batch_size=16))
    assert config_of(client, library, on_demand)["max_batch_size"] == 16
    client.load_model(on_demand, config=on_demand_config(), files={"file:7/model.py": NINE_TIMES})
    result = client.infer(on_demand, inputs)
    assert (result.as_numpy("OUTPUT0").tolist(), result.get_response(**library.as_json)["model_version"]) == ([9], "7")
    client.unload_model(on_demand)
    assert not client.is_model_ready(on_demand)
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.infer(on_demand, inputs)


def test_settings(client: Any, library: Library) -> None:
    def trace(method: str, *arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = library.ask(client, method, *arguments)
        if library.name == "http":
            return answer
        values = {name: setting.get("value", []) for name, setting in answer["settings"].items()}
        return {name: value if name == "trace_level" else "".join(value) for name, value in values.items()}

    def verbosity(method: str, *arguments: Any) -> int:
        answer = library.ask(client, method, *arguments)
        if library.name == "http":
            return int(answer["log_verbose_level"])
        return int(answer["settings"]["log_verbose_level"].get("uint32_param", 0))

    usual = trace("get_trace_settings")
    changed = trace("update_trace_settings", "add_sub", {"trace_rate": "7", "trace_count": "3"})
    assert (changed["trace_rate"], changed["trace_count"]) == ("7", "3")
    assert trace("get_trace_settings", "add_sub") == changed and trace("get_trace_settings") == usual
    assert trace("update_trace_settings", "add_sub", {"trace_rate": None, "trace_count": None}) == usual
    for level in (2, 0):
        assert verbosity("update_log_settings", {"log_verbose_level": level}) == verbosity("get_log_settings") == level


def test_python_models_load_over_grpc_again_and_again(triton: ServerProcess) -> None:
    """gRPC's fork handlers once killed most of the workers that started while a call was served."""
    config = on_demand_config(instance_group=[{"count": 3, "kind": "KIND_CPU"}])
    with GRPC.client(triton) as client:
        for _ in range(5):
            client.load_model("on_demand", config=config)
            client.unload_model("on_demand")
