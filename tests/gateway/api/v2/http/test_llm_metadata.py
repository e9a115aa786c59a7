"""Health, metadata and configuration of an LLM; errors are those of a recorded Triton 2.51."""

import pytest

from tests.gateway.front.http.live import LiveServer

MODEL = "/v2/models/rill"


def test_the_server(live: LiveServer) -> None:
    answer = live.get("/v2").json()
    assert answer.keys() == {"name", "version", "extensions"}
    assert "model_configuration" in answer["extensions"]


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", f"{MODEL}/ready", f"{MODEL}/versions/1/ready"])
def test_healthy(live: LiveServer, path: str) -> None:
    response = live.get(path)
    assert (response.status_code, response.content) == (200, b"")


def test_while_the_model_loads(loading_live: LiveServer) -> None:
    alive, ready = loading_live.get("/v2/health/live"), loading_live.get("/v2/health/ready")
    assert (alive.status_code, alive.content) == (200, b"")
    assert (ready.status_code, ready.content) == (400, b"")
    assert loading_live.get(f"{MODEL}/ready").status_code == 400
    for path in (MODEL, f"{MODEL}/config"):
        response = loading_live.get(path)
        assert response.status_code == 503
        assert response.json() == {"error": "model 'rill' is not ready: the server is loading its models"}


@pytest.mark.parametrize("path", [MODEL, f"{MODEL}/versions/1", f"{MODEL}/versions/01"])
def test_metadata(live: LiveServer, path: str) -> None:
    answer = live.get(path).json()
    assert list(answer) == ["name", "versions", "platform", "inputs", "outputs"]
    assert (answer["name"], answer["versions"]) == ("rill", ["1"])
    assert answer["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    assert {"name": "stop_words", "datatype": "BYTES", "shape": [-1]} in answer["inputs"]
    assert {"name": "seed", "datatype": "UINT64", "shape": [1]} in answer["inputs"]
    assert answer["outputs"][0] == {"name": "text_output", "datatype": "BYTES", "shape": [-1]}


@pytest.mark.parametrize("path", [f"{MODEL}/config", f"{MODEL}/versions/1/config"])
def test_config(live: LiveServer, path: str) -> None:
    config = live.get(path).json()
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("rill", "llm", 0)
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    # As Triton writes an input of its own.
    assert next(one for one in config["input"] if one["name"] == "max_tokens") == {
        "name": "max_tokens",
        "data_type": "TYPE_INT32",
        "format": "FORMAT_NONE",
        "dims": [1],
        "is_shape_tensor": False,
        "allow_ragged_batch": False,
        "optional": True,
        "is_non_linear_format_io": False,
    }
    assert config["input"][0]["data_type"] == "TYPE_STRING"
    info = live.model.info
    parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
    assert parameters["batch_scheduler_policy"] == "guaranteed_no_evict"
    assert parameters["max_tokens_in_paged_kv_cache"] == str(info.num_blocks * info.block_size)
    assert parameters["max_num_seqs"] == str(info.max_num_seqs)


def test_metadata_and_config_declare_the_same(live: LiveServer) -> None:
    metadata, config = live.get(MODEL).json(), live.get(f"{MODEL}/config").json()
    for in_metadata, in_config in (("inputs", "input"), ("outputs", "output")):
        names = [one["name"] for one in metadata[in_metadata]]
        assert [one["name"] for one in config[in_config]] == names


@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        ("GET", "/v2/models/nope", 404, "Request for unknown model: 'nope' is not found"),
        ("GET", "/v2/models/nope/config", 404, "Request for unknown model: 'nope' is not found"),
        ("GET", "/v2/models/nope/ready", 400, "Model version not ready"),
        ("GET", f"{MODEL}/versions/99/ready", 400, "Model version not ready"),
        ("GET", f"{MODEL}/versions/99/config", 404, "Request for unknown model: 'rill' version 99 is not found"),
        ("GET", f"{MODEL}/versions/99", 404, "Request for unknown model: 'rill' version 99 is not found"),
        ("GET", f"{MODEL}/versions/abc", 404, "Not Found"),
        ("GET", f"{MODEL}/versions/-1", 404, "Not Found"),
        ("GET", f"{MODEL}/versions/-1/ready", 404, "Not Found"),
        (
            "POST",
            f"{MODEL}/versions/99999999999999999999999/generate",
            400,
            "failed to get model version from specified version string '99999999999999999999999' (details: stol), "
            "version should be an integral value > 0",
        ),
        ("POST", "/v2/models/nope/generate", 404, "Request for unknown model: 'nope' is not found"),
        (
            "POST",
            f"{MODEL}/versions/9/generate_stream",
            404,
            "Request for unknown model: 'rill' version 9 is not found",
        ),
    ],
)
def test_what_is_not_there(live: LiveServer, method: str, path: str, status: int, error: str) -> None:
    response = live.request(method, path)
    assert response.status_code == status
    assert response.json() == {"error": error}
