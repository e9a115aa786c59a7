"""Versions that share requests: weights set and taken back while they serve, and clients that stay on a version."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.server_process import ServerProcess
from tests.triton.clients import Library

MODEL = "versioned"
ROUTING = f"/v2/repository/models/{MODEL}/routing"
NUM_REQUESTS = 400


@pytest.fixture
def server(triton: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=triton.base_url) as client:
        yield client
        client.post(ROUTING, json={"weights": None}).raise_for_status()


def weigh(server: httpx.Client, **weights: float) -> dict[str, Any]:
    named = {name.removeprefix("v"): weight for name, weight in weights.items()}
    answer: dict[str, Any] = server.post(ROUTING, json={"weights": named}).raise_for_status().json()
    return answer


def version_of(client: Any, library: Library, key: str = "", version: str = "") -> str:
    tensor = library.module.InferInput("INPUT0", [1], "INT32")
    tensor.set_data_from_numpy(np.array([1], np.int32))
    headers = {"x-sluice-sticky": key} if key else None
    result = client.infer(MODEL, [tensor], version, headers=headers)
    response = result.get_response()
    return str(response["model_version"] if isinstance(response, dict) else response.model_version)


def test_without_weights_the_highest_version_serves(server: httpx.Client, client: Any, library: Library) -> None:
    expected = {"model_name": MODEL, "weights": None, "is_set": False, "shares": {"2": 1.0, "1": 0.0}}
    assert server.get(ROUTING).json() == expected
    assert version_of(client, library) == "2"


def test_a_share_is_kept_by_key_and_taken_back_at_once(server: httpx.Client, client: Any, library: Library) -> None:
    shown = weigh(server, v1=75, v2=25)
    assert (shown["is_set"], shown["shares"]) == (True, {"2": 0.25, "1": 0.75})
    chosen = Counter(version_of(client, library) for _ in range(NUM_REQUESTS))
    assert abs(chosen["2"] - NUM_REQUESTS * 0.25) < 5 * (NUM_REQUESTS * 0.25 * 0.75) ** 0.5
    sticky = {key: version_of(client, library, key) for key in map(str, range(32))}
    assert set(sticky.values()) == {"1", "2"}
    assert {key: version_of(client, library, key) for key in sticky} == sticky
    assert version_of(client, library, version="2") == "2"

    weigh(server, v1=1)
    assert {version_of(client, library, key) for key in sticky} == {"1"}
    server.post(ROUTING, json={"weights": None}).raise_for_status()
    assert {version_of(client, library, key) for key in sticky} == {"2"}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "the body must hold 'weights' and nothing else"),
        ([], "the body must hold 'weights' and nothing else"),
        ({"weights": {"1": 1}, "x": 1}, "the body must hold 'weights' and nothing else"),
        ({"weights": {"1": "2"}}, 'got {"1":"2"}'),
        ({"weights": {"one": 2}}, 'got {"one":2}'),
        ({"weights": {"1": True}}, 'got {"1":true}'),
        ({"weights": {"1": 0, "2": 0}}, "weights must be numbers of at least 0, and one of them more"),
        ({"weights": {"1": -1, "2": 2}}, "weights must be numbers of at least 0, and one of them more"),
        ({"weights": {"7": 1}}, "version 7 of model 'versioned' does not serve; those that do: 1, 2"),
    ],
)
def test_what_are_no_weights_is_refused_and_changes_nothing(server: httpx.Client, body: object, reason: str) -> None:
    weigh(server, v1=1, v2=3)
    answer = server.post(ROUTING, content=json.dumps(body))
    assert answer.status_code == 400
    assert reason in answer.json()["error"]
    assert server.get(ROUTING).json()["weights"] == {"1": 1, "2": 3}


def test_a_model_that_there_is_not(server: httpx.Client) -> None:
    answer = server.get("/v2/repository/models/nobody/routing")
    assert (answer.status_code, answer.json()["error"]) == (404, "Request for unknown model: 'nobody' is not found")
