"""Health, metadata, methods and paths, as recorded from Triton 2.51."""

from typing import Any

import pytest

from gateway.v2.server import PROTOCOL_VERSION
from tests.gateway.http.v2.small_server import SmallServer

MODEL = "/v2/models/versioned"


def test_the_server(small: SmallServer) -> None:
    answer = small.get("/v2").json()
    assert (answer["name"], answer["version"]) == ("triton", PROTOCOL_VERSION)
    assert "binary_tensor_data" in answer["extensions"]


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready"])
def test_health(small: SmallServer, path: str) -> None:
    assert (small.get(path).status_code, small.get(path).content) == (200, b"")
    small.service.live = small.service.ready = False
    try:
        assert small.get(path).status_code == 400
    finally:
        small.service.live = small.service.ready = True


def test_metadata_names_the_versions_that_were_asked_about(small: SmallServer) -> None:
    tensor = {"datatype": "INT32", "shape": [-1]}
    expected: dict[str, Any] = {
        "name": "versioned",
        "versions": ["1", "2"],
        "platform": "python",
        "inputs": [{"name": "INPUT0", **tensor}],
        "outputs": [{"name": "OUTPUT0", **tensor}],
    }
    assert small.get(MODEL).json() == expected
    assert small.get(f"{MODEL}/versions/1").json() == expected | {"versions": ["1"]}


def test_config(small: SmallServer) -> None:
    for path in (f"{MODEL}/config", f"{MODEL}/versions/2/config"):
        config = small.get(path).json()
        assert config["name"] == "versioned"
        assert config["version_policy"] == {"specific": {"versions": [1, 2]}}


def test_statistics(small: SmallServer) -> None:
    body = {"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "INT32", "data": [1]}]}
    before = small.get(f"{MODEL}/versions/1/stats").json()["model_stats"][0]["inference_count"]
    assert small.post(f"{MODEL}/versions/1/infer", body).status_code == 200
    (row,) = small.get(f"{MODEL}/versions/1/stats").json()["model_stats"]
    assert (row["name"], row["version"], row["inference_count"]) == ("versioned", "1", before + 1)
    assert len(small.get(f"{MODEL}/stats").json()["model_stats"]) == 2
    assert len(small.get("/v2/models/stats").json()["model_stats"]) == len(small.service.repository.models())


@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        ("GET", "/v2/models/nope", 404, "Request for unknown model: 'nope' is not found"),
        ("GET", f"{MODEL}/versions/3/config", 404, "Request for unknown model: 'versioned' version 3 is not found"),
        ("GET", "/v2/models/nope/ready", 400, "Model version not ready"),
        ("GET", f"{MODEL}/versions/99/ready", 400, "Model version not ready"),
        ("GET", "/v2/models/nope/stats", 400, "requested model 'nope' is not available"),
        ("GET", f"{MODEL}/versions/9/stats", 400, "requested model version is not available for model 'versioned'"),
        ("GET", f"{MODEL}/versions/abc", 404, "Not Found"),
        ("GET", f"{MODEL}/versions/-1/ready", 404, "Not Found"),
        ("GET", f"{MODEL}/versions/", 404, "Not Found"),
        ("GET", f"{MODEL}/versions/1/", 404, "Not Found"),
        ("GET", f"{MODEL}/versions/1/trace/setting", 404, "Not Found"),
        ("GET", f"{MODEL}/", 404, "Not Found"),
        ("GET", f"{MODEL}/nope", 404, "Not Found"),
        ("GET", "/v2/", 404, "Not Found"),
        ("GET", "/v2/models", 404, "Not Found"),
        ("GET", "/v2/models//ready", 404, "Not Found"),
        ("GET", "/v2/health", 404, "Not Found"),
        ("GET", "/v2/health/live/", 404, "Not Found"),
        ("GET", "/v2/systemsharedmemory", 404, "Not Found"),
        ("GET", "/v2/systemsharedmemory/region/x/nope", 404, "Not Found"),
        ("GET", "/v2/nosharedmemory/status", 404, "Not Found"),
        ("POST", "/v2/repository/models/identity/nope", 404, "Not Found"),
        ("POST", "/v2/repository/models//load", 404, "Not Found"),
        (
            "POST",
            f"{MODEL}/versions/99999999999999999999999/infer",
            400,
            "failed to get model version from specified version string '99999999999999999999999' (details: stol), "
            "version should be an integral value > 0",
        ),
        ("POST", "/v2", 405, "Method Not Allowed"),
        ("POST", "/v2/health/live", 405, "Method Not Allowed"),
        ("POST", MODEL, 405, "Method Not Allowed"),
        ("GET", f"{MODEL}/infer", 405, "Method Not Allowed"),
        ("PUT", f"{MODEL}/infer", 405, "Method Not Allowed"),
        ("POST", "/v2/models/stats", 405, "Method Not Allowed"),
        ("PUT", "/v2/logging", 405, "Method Not Allowed"),
        ("GET", "/v2/repository/index", 405, "Method Not Allowed"),
        ("POST", "/v2/systemsharedmemory/status", 405, "Method Not Allowed"),
        ("GET", "/v2/systemsharedmemory/unregister", 405, "Method Not Allowed"),
    ],
)
def test_what_is_not_there(small: SmallServer, method: str, path: str, status: int, error: str) -> None:
    response = small.client.request(method, path)
    assert (response.status_code, response.json()) == (status, {"error": error})
    assert response.headers["content-type"] == "application/json"


def test_ready(small: SmallServer) -> None:
    for path in (f"{MODEL}/ready", f"{MODEL}/versions/1/ready"):
        assert (small.get(path).status_code, small.get(path).content) == (200, b"")


def test_head_has_no_body(small: SmallServer) -> None:
    response = small.client.head("/v2")
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-length"] == small.get("/v2").headers["content-length"]


def test_a_version_too_long_for_any_number(small: SmallServer) -> None:
    assert small.get(f"{MODEL}/versions/{'9' * 5000}").status_code == 400
